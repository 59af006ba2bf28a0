"""The runs of a sweep that train only adapters over the same base: one process trains them, and loads the base once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.pipeline.config import PipelineConfig
from flows.pipeline.graph import EVALUATE, NODES, pipeline_nodes
from trainer.contract.run import TrainConfig
from trainer.plan.sharing import base_settings, why_alone

OWN = ("train", "export")  # the nodes of a training that may differ


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the runs of a sweep share bases.

    Attributes:
        later: number of a run -> the trainings of the later runs over the same base.
        line: what a person is told about it.
    """

    later: Mapping[int, Sequence[TrainConfig]]
    line: str


def share_bases(configs: Sequence[PipelineConfig], names: Sequence[str]) -> Sharing:
    """Find the runs that can share a base.

    Args:
        names: the names of the runs, for the line.
    """
    groups: dict[str, list[int]] = {}
    alone: dict[str, list[str]] = {}
    for number, config in enumerate(configs):
        if why := _why_alone(config):
            alone.setdefault(why, []).append(names[number])
        else:
            groups.setdefault(_base_of(config), []).append(number)
    shared = [group for group in groups.values() if len(group) > 1]
    single = [names[group[0]] for group in groups.values() if len(group) == 1]
    if single:
        alone["no other run has its base, data and layout"] = single
    later = {run: [configs[other].train for other in group if other > run] for group in shared for run in group}
    return Sharing(later, _line([[names[run] for run in group] for group in shared], alone))


def _why_alone(config: PipelineConfig) -> str:
    launcher = config.execution.cluster.launcher
    if launcher != "torchrun":
        return f"execution.cluster.launcher={launcher} starts a job for each run"
    return why_alone(config.train, config.execution.parallel)


def _base_of(config: PipelineConfig) -> str:
    """Return a text that is equal for two configurations whose trainings have the same base, inputs and execution."""
    nodes = pipeline_nodes(config, [flow for flow in NODES if flow != EVALUATE])
    inputs = [(node.name, node.config.model_dump(mode="json"), node.inputs) for node in nodes if node.name not in OWN]
    start = (config.model, config.sources, config.start_adapter)
    return repr((start, inputs, config.execution.model_dump(mode="json"), base_settings(config.train)))


def _line(shared: Sequence[Sequence[str]], alone: Mapping[str, Sequence[str]]) -> str:
    parts = [f"one process trains these over one load of the base: {'; '.join(group)}" for group in shared]
    parts += [f"trained alone, because {why}: {'; '.join(runs)}" for why, runs in alone.items()]
    if not shared and len(alone) == 1:
        parts = [f"each run loads the model by itself: {why}" for why in alone]
    return ". ".join(part[0].upper() + part[1:] for part in parts)
