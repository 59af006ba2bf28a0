"""The graph: every stage of the pipeline, its inputs, and the resources that it holds while it runs.

The flows, `athanor plan`, the MLflow run and the closing table are made from this list. A new stage needs a folder in
stages/ and one Node here.
"""

import enum
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.embedded.easy_vqa import check_installed
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, location, side_dir
from flows.pipeline.config import PipelineConfig
from flows.resources.host import this_host
from stages.artifacts.artifact import Artifact, External, Input, Stage, artifact_dir, changed_inputs, stage_identity
from stages.artifacts.run_stage import why_rebuild
from stages.convert.config import RAW
from stages.encode.images import load_image_config
from stages.encode.template import check_template
from stages.encode_images.config import EncodeImagesConfig, EncodingConfig
from stages.inputs.adapter_directory import adapter_input
from stages.inputs.config import EmbeddedEasyVqaConfig
from stages.inputs.ends import end_ids
from stages.inputs.hf_directory import (
    check_hf_dir,
    check_mtp_tensors,
    hf_dir_of,
    model_input,
    processor_input,
    read_json,
    resolve_hf_dir,
)
from stages.inputs.raw_source import open_raw
from stages.release.config import ReleaseConfig
from trainer.contract.machine.modules import check_precision, describe
from trainer.contract.peft import check_start
from trainer.contract.run import TrainConfig
from trainer.model.family import Family
from trainer.model.registry import get_family, read_model
from trainer.model.shape import ModelShape
from trainer.model.targets import adapted_layers
from trainer.model.whole_modules import check_adapter
from trainer.plan.checks import check_cached, check_experts, check_mtp, check_training

RAW_DIGESTS = "raw-digests.json"


class Needs(enum.Flag):
    """The resources that a stage holds while it runs."""

    NOTHING = 0
    WORKERS = enum.auto()  # workers of the Dask cluster, if there is one
    SLOT = enum.auto()  # a slot of the concurrency limit of the machine that runs its jobs, since they use GPUs
    METRICS = enum.auto()  # a listener to its metrics.jsonl


@dataclass(frozen=True, slots=True)
class Node:
    """A stage in the pipeline.

    Attributes:
        name: name of its Prefect task, of its row in the closing table and of its pages. A stage that runs twice has
            two nodes with different names.
        stage: "module:STAGE", imported when it is needed.
        config: the stage's identity config.
        inputs: role of an input -> name of the node or external input that is read in this role.
        beside: name of a node that may run at the same time, which begins when this one's inputs are there; empty: this
            node runs alone.
    """

    name: str
    stage: str
    config: BaseModel
    inputs: Mapping[str, str]
    needs: Needs = Needs.NOTHING
    beside: str = ""

    def load(self) -> Stage:
        """Return the stage. This imports its libraries."""
        module, attribute = self.stage.split(":")
        return getattr(importlib.import_module(module), attribute)

    def read(self, available: Mapping[str, Input]) -> dict[str, Input]:
        """Return role -> input.

        Args:
            available: name of a node or external input -> input.
        """
        return {role: in_role(role, available[source]) for role, source in self.inputs.items()}


def data_nodes(config: PipelineConfig) -> Iterator[Node]:
    """Yield the nodes of the data stages: raw rows -> sample shards -> tokenized shards -> bins."""
    workers, raw = Needs.WORKERS, {role: role for role in config.sources} or {RAW: "embedded_data"}
    if isinstance(config.data, BaseModel):
        is_easy_vqa = isinstance(config.data, EmbeddedEasyVqaConfig)
        stage = "stages.inputs.easy_vqa:STAGE" if is_easy_vqa else "stages.inputs.digits:STAGE"
        yield Node("embedded_data", stage, config.data, {}, workers)
    yield Node("convert", "stages.convert.stage:STAGE", config.convert_config, raw, workers)
    samples = {"samples": "convert"}
    if isinstance(config.model, BaseModel):
        yield Node("embedded_model", "stages.inputs.tiny_model:STAGE", config.model, samples, workers)
    if config.contamination is not None:
        stage = "stages.contamination.stage:STAGE"
        yield Node("contamination", stage, config.contamination, samples, workers, beside="tokenize")
    processor = "processor" if isinstance(config.model, str) else "embedded_model"
    tokenized = samples | {"processor": processor}
    yield Node("tokenize", "stages.tokenize.stage:STAGE", config.tokenize, tokenized, workers)
    yield Node("plan_bins", "stages.plan_bins.stage:STAGE", config.plan_bins_config, {"tokenized": "tokenize"}, workers)


def training_nodes(config: PipelineConfig) -> Iterator[Node]:
    """Yield the nodes of the training: bins and weights -> checkpoints -> an HF directory."""
    start = {"model": model_source(config), "tokenized": "tokenize"}
    learnt_from = {**start, "bins": "plan_bins"}
    if config.encode_images is not None:
        encoding = encoding_config(config.encode_images, config.train)
        yield Node("encode_images", "stages.encode_images.stage:STAGE", encoding, start, Needs.SLOT)
        learnt_from["features"] = "encode_images"
    if config.start_adapter is not None:
        learnt_from["adapter"] = "adapter"
    yield Node("train", "stages.train.stage:STAGE", config.train, learnt_from, Needs.SLOT | Needs.METRICS)
    yield Node("export", "stages.export.stage:STAGE", config.export, {"train": "train", **start}, Needs.SLOT)


def scoring_nodes(config: PipelineConfig) -> Iterator[Node]:
    """Yield the nodes of the evaluation: the answers and scores of the export and of the model before training, the
    answers of other programs, the comparison, and the release with its model card."""
    answer, evaluate = "stages.answer.stage:STAGE", "stages.evaluate.stage:STAGE"
    questions = {"samples": "convert"}
    scored = questions | ({} if config.contamination is None else {"contamination": "contamination"})
    before = {"hf": model_source(config), **questions, "tokenized": "tokenize"}
    tuned = {"hf": "export", **questions} if config.evaluate.adapter == "merged" else {**before, "adapter": "export"}
    yield Node("answer", answer, config.evaluate.answer, tuned, Needs.SLOT)
    if config.reload is not None:
        loaded = {"export": "export", "model": model_source(config), "answers": "answer", **questions}
        yield Node("reload", "stages.reload.stage:STAGE", config.reload, loaded, Needs.SLOT)
    yield Node("evaluate", evaluate, config.evaluate.scoring, {"answers": "answer", **scored, "made_by": "train"})
    released = {"export": "export", "train": "train", "evaluate": "evaluate", **scored}
    released |= {} if config.reload is None else {"reload": "reload"}
    if config.compare is not None:
        beside = "train" if trains_here(config) and not this_host().gpu else ""  # a GPU has no room for both
        yield Node("answer_base", answer, config.evaluate.answer, before, Needs.SLOT, beside)
        of_base = {"answers": "answer_base", **scored, "start_of": "train"}
        yield Node("evaluate_base", evaluate, config.evaluate.scoring, of_base)
        both = {"base": "evaluate_base", "tuned": "evaluate", **questions}
        yield Node("compare", "stages.compare.stage:STAGE", config.compare, both)
        released["compare"] = "compare"
    yield Node("release", "stages.release.stage:STAGE", release_config(config), released)


PREPARE_DATA, TRAIN, EVALUATE = "prepare-data", "vlm-sft", "evaluate"
# Flow -> functions that make its nodes. `vlm-sft` runs the nodes of all flows, in this order.
NODES: dict[str, list[Callable[[PipelineConfig], Iterable[Node]]]] = {
    PREPARE_DATA: [data_nodes],
    TRAIN: [training_nodes],
    EVALUATE: [scoring_nodes],
}


def pipeline_nodes(config: PipelineConfig, flows: Iterable[str] = tuple(NODES)) -> list[Node]:
    """Return the nodes of a configuration in the order in which they run."""
    return [node for flow in flows for make_nodes in NODES[flow] for node in make_nodes(config)]


def data_stage(config: PipelineConfig) -> str | None:
    """Return the name of the stage that makes the raw rows; None if the user gives the rows."""
    return None if config.sources else "embedded_data"


def model_source(config: PipelineConfig) -> str:
    """Return the name of the input that holds the weights: the external input, or the stage that makes them."""
    return "model" if isinstance(config.model, str) else "embedded_model"


def encoding_config(settings: EncodeImagesConfig, train: TrainConfig) -> EncodingConfig:
    """Return the settings of encode_images, with the precision that the vision encoder has in the training."""
    precision = "float32" if train.precision == "float32" else "bfloat16"
    return EncodingConfig(**settings.model_dump(), precision=precision)


def release_config(config: PipelineConfig) -> ReleaseConfig:
    """Return the facts about the run for the model card."""
    data = list(config.sources.values()) or [f"{data_stage(config)} (made by athanor)"]
    return ReleaseConfig(
        name=config.mlflow_name,
        base_model=config.model if isinstance(config.model, str) else None,
        datasets=data,
        recipe=config.identity(),
    )


def check_data(config: PipelineConfig) -> None:
    """Check that the package is installed from which a stage will make the raw rows.

    Raises:
        InputError: it is not installed, or in another version.
    """
    if isinstance(config.data, EmbeddedEasyVqaConfig):
        check_installed(config.data.version)


def check_model(config: PipelineConfig) -> Path | None:
    """Check the model and return the directory of the user's model; None if a stage makes the model.

    Raises:
        InputError: the model is missing, incomplete, of an unknown kind, or does not fit the training or its layout.
    """
    if not isinstance(config.model, str):
        _check_family(config, get_family(config.model.family), config.model.shape)
        return None
    hf_dir = resolve_hf_dir(config.model)
    check_hf_dir(hf_dir, config.execution.model_code_sha256)
    check_template(hf_dir)
    end_ids(hf_dir)
    load_image_config(hf_dir, config.tokenize.min_pixels, config.tokenize.max_pixels)
    family, shape = read_model(hf_dir, config.train)
    _check_family(config, family, shape)
    config.check_parallel(shape)
    check_mtp_tensors(hf_dir, shape)
    return hf_dir


def check_start_adapter(config: PipelineConfig) -> Path | None:
    """Check and return the directory of the adapter that the training starts from; None if adapters are initialised.

    Raises:
        InputError: the adapter does not exist, or it does not fit the adapters of the training.
    """
    if config.start_adapter is None:
        return None
    directory = resolve_hf_dir(config.start_adapter, "start_adapter")
    check_start(directory, config.train.adapter)
    return directory


def _check_family(config: PipelineConfig, family: Family, shape: ModelShape) -> None:
    if config.encode_images is not None:
        check_cached(config.train.frozen, config.execution.parallel, family)
    check_training(config.train, config.execution.parallel, family)
    check_adapter(config.train, family, shape)
    _check_beside(config, family, shape)
    check_experts(config.train, config.execution.parallel, shape)
    check_mtp(config.train, config.execution.parallel, shape)
    if trains_here(config):
        check_precision(config.train.precision, config.execution.modules, this_host())
        modules_line(config)


def _check_beside(config: PipelineConfig, family: Family, shape: ModelShape) -> None:
    """Check that answers with an unmerged adapter are not asked of one that has experts.

    Raises:
        InputError: they are.
    """
    if config.evaluate.adapter == "merged" or config.train.adapter is None:
        return
    stacks = [
        layer for layer in adapted_layers(family.weight_rules(shape), config.train.adapter) if layer.rule.matrices
    ]
    if stacks:
        raise InputError(
            f"evaluate.adapter=beside, and train.adapter.targets names {stacks[0].modules[0]}: adapters of experts do "
            "not answer unmerged; set evaluate.adapter=merged, or leave experts out of the targets"
        )


def trains_here(config: PipelineConfig) -> bool:
    """Whether the training runs on this host."""
    return config.execution.cluster.launcher == "torchrun"


def modules_line(config: PipelineConfig) -> str:
    """Return a line that names the modules with which the training will compute on this host.

    Raises:
        InputError: the recipe asks for modules that are not available here.
    """
    return f"training will use {describe(config.execution.modules, this_host())}"


def first_lines(config: PipelineConfig) -> Iterator[str]:
    """Yield the lines that `plan` and `run` begin with: the modules of the training, and the end that is added to the
    model.

    Raises:
        InputError: see `modules_line` and `end_ids`.
    """
    if trains_here(config):
        yield modules_line(config)
    if not isinstance(config.model, str):
        return
    hf_dir = resolve_hf_dir(config.model)
    token, ends, file = read_model(hf_dir)[0].turn_tokens[-1], end_ids(hf_dir), hf_dir / "tokenizer.json"
    for added in read_json(file).get("added_tokens", []) if file.is_file() else []:
        if added["content"] == token and (number := added["id"]) not in ends:
            yield f"trained turns end with {token} ({number}), which the export adds to the model's eos_token_id {ends}"


def open_inputs(config: PipelineConfig, root: StorePath) -> dict[str, Input]:
    """Check and return the external inputs of a configuration, which no stage makes.

    Returns:
        name -> input. The names are "raw" (or "raw-NAME" for each of several sources), "model", "processor" and
        "adapter".

    Raises:
        InputError: a directory, a hub name or a package is missing, is of an unknown kind, or does not fit the layout.
    """
    check_data(config)
    externals: dict[str, Input] = {}
    for role, reading in config.convert_config.readings.items() if config.sources else ():
        memo = side_dir(root) / RAW_DIGESTS
        externals[role] = open_raw(config.sources[role], reading.subsets, reading.builder, memo)
    if (hf_dir := check_model(config)) is not None:
        externals["model"] = model_input(hf_dir)
        externals["processor"] = processor_input(hf_dir)
    if (adapter_dir := check_start_adapter(config)) is not None:
        externals["adapter"] = adapter_input(adapter_dir)
    return externals


class ArtifactRef(StrictModel):
    """The reference to an input: plain values, which can be passed to a task.

    Attributes:
        dir: directory or URL of the input.
        external: the name of an external input ("raw", "hf_dir", "processor" or "adapter"); empty for an artifact.
        digest: the digest of an external input.
    """

    dir: str
    external: str = ""
    digest: str = ""


def place_of(item: Input) -> ArtifactRef:
    """Return the place of an input."""
    if isinstance(item, Artifact):
        return ArtifactRef(dir=str(item.dir))
    return ArtifactRef(dir=str(item.dir), external=item.name, digest=item.digest)


def open_place(place: ArtifactRef, role: str) -> Input:
    """Open the input at a place. A directory of a model or adapter is digested again, since it may have changed."""
    path = location(place.dir)
    if place.external == "raw":
        return External(path, "raw", place.digest)
    if place.external == "adapter":
        return adapter_input(path)
    if place.external:
        return model_input(path) if place.external == "hf_dir" else processor_input(path)
    return in_role(role, Artifact.load(path))


def in_role(role: str, item: Input) -> Input:
    """Return the input as a stage reads it. An embedded model in the role "processor" is read without its weights,
    because they have no influence on the tokens."""
    is_embedded = role == "processor" and isinstance(item, Artifact)
    return processor_input(hf_dir_of(item)) if is_embedded else item


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage in the plan of a run.

    Attributes:
        artifact: the finished artifact, which will be reused; None if it will be made.
        why: the reason, in words.
    """

    name: str
    artifact: Artifact | None
    why: str


def plan_stages(config: PipelineConfig, root: StorePath) -> tuple[list[PlannedStage], dict[str, Input]]:
    """Return every stage as a run would treat it, and every input that is available now. Runs and writes nothing.

    Raises:
        InputError: see `open_inputs`.
    """
    available = open_inputs(config, root)
    planned = []
    for node in pipeline_nodes(config):
        missing = [source for source in node.inputs.values() if source not in available]
        if missing:
            planned.append(PlannedStage(node.name, None, f"its input {missing[0]} will be made first"))
            continue
        planned.append(_plan_stage(node, node.read(available), root))
        if (artifact := planned[-1].artifact) is not None:
            available[node.name] = artifact
    return planned, available


def _plan_stage(node: Node, inputs: Mapping[str, Input], root: StorePath) -> PlannedStage:
    stage = node.load()
    identity = stage_identity(stage, node.config, inputs)
    directory = artifact_dir(root, stage, identity)
    if (directory / MANIFEST).is_file():
        artifact = Artifact.load(directory)
        if changed := changed_inputs(artifact, inputs):
            return PlannedStage(node.name, None, f"its input {changed[0]} was made again with other content")
        return PlannedStage(node.name, artifact, f"{directory.name} is finished")
    return PlannedStage(node.name, None, why_rebuild(root, stage, identity))
