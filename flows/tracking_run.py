"""What the MLflow run of a pipeline is opened with: its name, its tags and its description."""

from collections.abc import Mapping
from typing import Any

from prefect.runtime import flow_run

from dataset_builders.contracts.fingerprint import fingerprint, flatten
from dataset_builders.contracts.store import location
from flows.pipeline_config import PipelineConfig
from flows.stage_graph import external_digests, get_stage, pipeline_nodes
from stages.artifact import Input
from stages.source_version import source_version
from stages.tracking import open_run, run_name


def open_tracking(
    config: PipelineConfig, root: str, found: Mapping[str, Input], recipe: str, differs: Mapping[str, Any]
) -> str | None:
    versions = {node.name: get_stage(node.name).version for node in pipeline_nodes(config)}
    identity = fingerprint({"config": config.identity(), "versions": versions, "inputs": external_digests(found)})
    source = source_version()
    tags = {
        "athanor.recipe": recipe,
        "athanor.differs": ", ".join(f"{key}={value}" for key, value in differs.items()) or "nothing",
        "prefect.flow_run_id": str(flow_run.id or ""),
        "athanor.git_dirty": source.get("dirty", "unknown"),
        "mlflow.source.git.commit": source.get("commit", "unknown"),
        "mlflow.source.name": "athanor run",
        "mlflow.note.content": f"Recipe **{recipe}**. {_differences(differs)}",
        **{k: str(v) for k, v in flatten({"execution": config.execution.model_dump(mode="json")}).items()},
    }
    name = run_name(recipe, differs)
    return open_run(location(root), f"athanor-{config.name}", name, identity, config.identity(), tags)


def _differences(differs: Mapping[str, Any]) -> str:
    if not differs:
        return "Nothing differs from it."
    return "What differs from it:\n\n" + "\n".join(f"- `{key}` = `{value}`" for key, value in differs.items())
