"""Plans whose inputs are not opened: stand-ins take their place."""

from pathlib import Path

from flows.pipeline.config import PipelineConfig
from flows.pipeline.plan import Plan
from flows.pipeline.steps import Step
from stages.shared.artifacts.artifact import Artifact, External


def unopened(config: PipelineConfig, **artifacts: Artifact) -> Plan:
    """Return the plan of a configuration. The directory of its model is the one that the configuration names.

    Args:
        artifacts: name of a step -> its finished artifact.
    """
    plan = Plan(recipe="recipe", config=config, differs={}, root=Path("/nowhere"))
    places = dict(config.sources)
    if isinstance(config.model, str):
        places |= {"model": config.model, "processor": config.model}
    if config.start_adapter is not None:
        places["adapter"] = config.start_adapter
    plan._given.update({name: External(Path(place), name, "0" * 16) for name, place in places.items()})
    for name, artifact in artifacts.items():
        plan.step(name).artifact = artifact
    return plan


def steps_of(config: PipelineConfig) -> dict[str, Step]:
    return {step.name: step for step in unopened(config).steps}


def sources_of(step: Step) -> dict[str, str]:
    """Return role -> name of the step or external input that is read in this role."""
    return {role: item.name for role, item in step.inputs.items()}
