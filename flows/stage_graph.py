"""Which stage reads what: the one description of the pipeline that the plan and the flows share."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.store import StorePath, side_dir
from flows.pipeline_config import PipelineConfig
from stages.artifact import Artifact, External, Input, Stage, artifact_dir, stage_identity, why_rebuild
from stages.drawn_data import DrawnDataConfig
from stages.hf_directory import check_hf_dir, model_input, processor_input, resolve_hf_dir
from stages.raw_source import open_raw
from stages.release import ReleaseConfig
from stages.train import hf_dir_of
from trainer.contract.model_facts import ModelFacts

STAGES: dict[str, str] = {
    "embedded_data": "stages.embedded_data:STAGE",
    "drawn_data": "stages.drawn_data:STAGE",
    "embedded_model": "stages.embedded_model:STAGE",
    "convert": "stages.convert:STAGE",
    "contamination": "stages.contamination:STAGE",
    "tokenize": "stages.tokenize_samples:STAGE",
    "plan_bins": "stages.plan_bins:STAGE",
    "train": "stages.train:STAGE",
    "export": "stages.export:STAGE",
    "answer": "stages.answer:STAGE",
    "evaluate": "stages.evaluate:STAGE",
    "answer_base": "stages.answer:STAGE",
    "evaluate_base": "stages.evaluate:STAGE",
    "compare": "stages.compare:STAGE",
    "release": "stages.release:STAGE",
}
RAW_DIGESTS = "raw-digests.json"


def get_stage(name: str) -> Stage:
    """The stage of this name; its module is imported now."""
    module, attribute = STAGES[name].split(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, slots=True)
class Node:
    """A stage in the pipeline: its config, and which nodes its inputs come from ("role" -> node name)."""

    name: str
    config: BaseModel
    inputs: dict[str, str]


def data_stage(config: PipelineConfig) -> str | None:
    """The stage that makes the raw rows; None: they are a source of the user's."""
    if isinstance(config.data, str):
        return None
    return "drawn_data" if isinstance(config.data, DrawnDataConfig) else "embedded_data"


def pipeline_nodes(config: PipelineConfig) -> list[Node]:
    """The stages of a configuration in the order they run. `raw`, `model`, `processor` may also be external."""
    raw = data_stage(config) or "raw"
    model = "embedded_model" if isinstance(config.model, BaseModel) else "model"
    nodes = [Node(raw, config.data, {})] if isinstance(config.data, BaseModel) else []
    if isinstance(config.model, BaseModel):
        nodes.append(Node("embedded_model", config.model, {"raw": raw}))
    nodes.append(Node("convert", config.convert, {"raw": raw}))
    if config.contamination is not None:
        nodes.append(Node("contamination", config.contamination, {"samples": "convert"}))
    return [
        *nodes,
        Node("tokenize", config.tokenize, {"samples": "convert", "processor": "processor"}),
        Node("plan_bins", config.plan_bins, {"tokenized": "tokenize"}),
        Node("train", config.train, {"model": model, "tokenized": "tokenize", "bins": "plan_bins"}),
        Node("export", config.export, {"train": "train", "model": model, "tokenized": "tokenize"}),
        *_scoring_nodes(config, model),
    ]


def _scoring_nodes(config: PipelineConfig, model: str) -> list[Node]:
    """From the export on: its answers and scores, those before training, the difference, the card."""
    asked = {"samples": "convert"}
    scored = asked | ({} if config.contamination is None else {"contamination": "contamination"})
    nodes = [
        Node("answer", config.evaluate.answer, {"hf": "export", **asked}),
        Node("evaluate", config.evaluate, {"answers": "answer", **scored, "made_by": "train"}),
    ]
    released = {"export": "export", "train": "train", "evaluate": "evaluate", **scored}
    if config.compare is not None:
        nodes += [
            Node("answer_base", config.evaluate.answer, {"hf": model, **asked, "tokenized": "tokenize"}),
            Node("evaluate_base", config.evaluate, {"answers": "answer_base", **scored, "start_of": "train"}),
            Node("compare", config.compare, {"base": "evaluate_base", "tuned": "evaluate", **asked}),
        ]
        released["compare"] = "compare"
    return [*nodes, Node("release", release_config(config), released)]


def release_config(config: PipelineConfig) -> ReleaseConfig:
    """What the card says of the run."""
    data = config.data if isinstance(config.data, str) else f"{data_stage(config)} (made by athanor)"
    return ReleaseConfig(
        name=f"athanor-{config.name}",
        base_model=config.model if isinstance(config.model, str) else None,
        datasets=[data],
        recipe=config.identity(),
    )


def open_inputs(config: PipelineConfig, root: StorePath) -> dict[str, Input]:
    """The external inputs of a configuration, found and checked: "raw", "model", "processor".

    Raises:
        InputError: a directory or hub name is not there, is not what it should be, or does not fit the layout.
    """
    found: dict[str, Input] = {}
    if isinstance(config.data, str):
        convert = config.convert
        found["raw"] = open_raw(config.data, convert.subsets, convert.builder, side_dir(root) / RAW_DIGESTS)
    if isinstance(config.model, str):
        hf_dir = resolve_hf_dir(config.model)
        model_config = check_hf_dir(hf_dir, config.execution.model_code_sha256)
        config.check_parallel(ModelFacts.from_hf(model_config, hf_dir / "config.json"))
        found["model"] = model_input(hf_dir)
        found["processor"] = processor_input(hf_dir)
    return found


def with_processor(found: dict[str, Input]) -> dict[str, Input]:
    """Add "processor" once the embedded model is made: tokens depend on its tokenizer, not on its weights."""
    if "processor" not in found and "embedded_model" in found:
        found["processor"] = processor_input(hf_dir_of(found["embedded_model"]))
    return found


def load_input(path: StorePath, kind: str) -> Input:
    """An input from its path: a stage's artifact, or else an external model or processor directory.

    Args:
        kind: "model" or "processor", which decides what of an external directory counts.
    """
    if kind == "model" and (path / MANIFEST).is_file():
        return Artifact.load(path)
    return model_input(path) if kind == "model" else processor_input(path)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """What a run would do with a stage.

    Attributes:
        artifact: there already, and will be used again; None when it will be made.
        why: it will be made, in words.
    """

    name: str
    artifact: Artifact | None
    why: str


def plan_stages(config: PipelineConfig, root: StorePath) -> tuple[list[PlannedStage], dict[str, Input]]:
    """Per stage: used again, or made and why; and every input that is there now. Runs and writes nothing.

    Raises:
        InputError: an external input is not there.
    """
    found = open_inputs(config, root)
    planned = []
    for node in pipeline_nodes(config):
        with_processor(found)
        waits = [source for source in node.inputs.values() if source not in found]
        if waits:
            first = "embedded_model" if waits[0] == "processor" else waits[0]
            planned.append(PlannedStage(node.name, None, f"its input {first} will be made first"))
            continue
        planned.append(_plan_stage(node, {role: found[source] for role, source in node.inputs.items()}, root))
        if (artifact := planned[-1].artifact) is not None:
            found[node.name] = artifact
    return planned, found


def _plan_stage(node: Node, inputs: Mapping[str, Input], root: StorePath) -> PlannedStage:
    stage = get_stage(node.name)
    identity = stage_identity(stage, node.config, inputs)
    directory = artifact_dir(root, stage, identity)
    if (directory / MANIFEST).is_file():
        return PlannedStage(node.name, Artifact.load(directory), "")
    return PlannedStage(node.name, None, why_rebuild(root, stage, identity))


def external_digests(found: Mapping[str, Input]) -> dict[str, str]:
    """Name -> digest of the inputs that no stage made."""
    return {name: item.digest for name, item in found.items() if isinstance(item, External)}
