"""Plan: a recipe whose inputs are checked and open, with the steps that make its model.

`athanor plan` prints it; `athanor run`, a sweep and a worker of the service execute it. A process opens it once, and
imports neither Prefect nor torch for that: a wrong recipe is refused before these are loaded.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, PlainSerializer, PrivateAttr, SkipValidation

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError, without_middle
from dataset_builders.readers.source_files import nearest
from dataset_builders.sources.embedded import check_easy_vqa
from dataset_builders.storage.store import StorePath, side_dir
from flows.pipeline.config import PipelineConfig
from flows.pipeline.host import this_host
from flows.pipeline.recipe import Recipe
from flows.pipeline.steps import Step, make_steps
from stages.shared.artifacts.artifact import Artifact, Input, artifact_dir, changed_inputs, stage_identity
from stages.shared.artifacts.run_stage import why_rebuild
from stages.shared.chat_format.images import embedded_video_config, load_image_config, load_video_config
from stages.shared.chat_format.template import check_template
from stages.shared.inputs.adapter_directory import AdapterDirectory, adapter_input
from stages.shared.inputs.config import EmbeddedEasyVqaConfig
from stages.shared.inputs.model_directory import (
    ModelDirectory,
    end_ids,
    model_input,
    opened_model,
    processor_input,
    read_json,
    resolve_hf_dir,
)
from stages.shared.inputs.raw_source import open_raw
from trainer.contract.modules import check_precision, describe
from trainer.contract.peft import check_start
from trainer.model.adapters import adapted_layers, check_adapter
from trainer.model.family import Family
from trainer.model.registry import get_family
from trainer.model.shape import ModelShape
from trainer.plan.checks import check_cached, check_experts, check_mtp, check_training

RAW_DIGESTS = "raw-digests.json"


class Plan(StrictModel):
    """A checked recipe with its open inputs and its steps.

    It is the only parameter of the flows, whose runs show its fields in Prefect's UI. Inputs and steps are private
    attributes, since Prefect would walk through the fields, and these hold manifests of millions of shards.

    Attributes:
        recipe: name of the recipe, for people.
        differs: dotted fields that differ from the recipe, with their values.
        root: directory or URL below which all files are stored.
        sweep: name of the sweep that the run belongs to; empty: none.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    recipe: str
    config: PipelineConfig
    differs: dict[str, Any]
    root: Annotated[StorePath, SkipValidation, PlainSerializer(str)]
    sweep: str = ""
    _given: dict[str, Input] = PrivateAttr(default_factory=dict)
    _steps: list[Step] = PrivateAttr(default_factory=list)

    @classmethod
    def open(cls, recipe: Recipe, root: StorePath, sweep: str = "") -> "Plan":
        """Check the inputs of a recipe and open each once.

        Raises:
            InputError: a directory, a hub name or a package is missing, is of an unknown kind, or does not fit the
                training or its layout.
        """
        plan = cls(recipe=recipe.name, config=recipe.config, differs=recipe.differs, root=root, sweep=sweep)
        plan._given.update(_open_inputs(recipe.config, root))
        return plan

    @property
    def given(self) -> Mapping[str, Input]:
        """Name -> external input, which no stage makes. The names are "raw" (or "raw-NAME" for each of several
        sources), "model", "processor" and "adapter"."""
        return self._given

    @property
    def steps(self) -> list[Step]:
        """The steps in the order in which they run."""
        if not self._steps:
            self._steps = make_steps(self.config, self._given)
        return self._steps

    def step(self, name: str) -> Step | None:
        """Return a step; None if this recipe has no step of that name."""
        return next((step for step in self.steps if step.name == name), None)

    def artifact(self, name: str) -> Artifact | None:
        """Return the finished artifact of a step; None if there is none, or no step of that name."""
        step = self.step(name)
        return None if step is None else step.artifact

    def find_finished(self) -> dict[str, str]:
        """Find the artifacts that a run would reuse, and return for each step the reason why its artifact is reused or
        made, in words. Nothing is run or written."""
        return {step.name: self._find(step) for step in self.steps}

    def check_subsets(self) -> None:
        """Check the subsets that the recipe names, once its samples are made; see `check_subsets`."""
        if (samples := self.artifact("convert")) is not None:
            check_subsets(self.config, samples.manifest.stats["samples"])

    def _find(self, step: Step) -> str:
        if (before := step.missing()) is not None:
            return f"its input {before.name} will be made first"
        inputs = step.read()
        identity = stage_identity(step.stage, step.config, inputs)
        directory = artifact_dir(self.root, step.stage, identity)
        if not (directory / MANIFEST).is_file():
            return why_rebuild(self.root, step.stage, identity)
        artifact = Artifact.load(directory)
        if changed := changed_inputs(artifact, inputs):
            return f"its input {changed[0]} was made again with other content"
        step.artifact = artifact
        return f"{directory.name} is finished"


def check_subsets(config: PipelineConfig, counts: Mapping[str, Mapping[str, int]]) -> None:
    """Check that the subsets are there for which a recipe has a mixture, metrics, a gate or the champion's metric.

    Args:
        counts: subset -> split -> number of samples.

    Raises:
        InputError: one has no samples, of the split that the setting is about.
    """
    registry = config.execution.registry
    scores = {f"execution.registry.gates.{name}": name for name in registry.gates}
    scores[f"execution.registry.metric={registry.metric}"] = registry.metric
    named = [(f"plan_bins.mixture.{name}", name, ("train",)) for name in config.plan_bins.mixture]
    named += [(f"evaluate.metrics.{name}", name, SPLITS) for name in config.evaluate.metrics]
    named += [(field, name.partition("/")[2], ("heldout",)) for field, name in scores.items() if "/" in name]
    for field, subset, splits in named:
        there = sorted(name for name, numbers in counts.items() if any(numbers.get(split) for split in splits))
        if subset not in there:
            kind = {"train": "training ", "heldout": "held-out "}[splits[0]] if len(splits) == 1 else ""
            known = without_middle(", ".join(there), 400)
            raise InputError(f"{field}: no {kind}sample is of {subset!r}, only of {known}{nearest(subset, there)}")


def _open_inputs(config: PipelineConfig, root: StorePath) -> Iterator[tuple[str, Input]]:
    if isinstance(config.data, EmbeddedEasyVqaConfig):
        check_easy_vqa(config.data.version)
    for role, reading in config.convert_config.readings.items() if config.sources else ():
        memo = side_dir(root) / RAW_DIGESTS
        yield role, open_raw(config.sources[role], reading.subsets, reading.builder, memo)
    if (model := check_model(config)) is not None:
        yield "model", model_input(model)
        yield "processor", processor_input(model)
    if config.start_adapter is not None:
        directory = resolve_hf_dir(config.start_adapter, "start_adapter")
        check_start(directory, config.train.adapter)
        yield "adapter", adapter_input(AdapterDirectory(directory))


def check_model(config: PipelineConfig) -> ModelDirectory | None:
    """Check the model and return the open directory of the user's model; None if a stage makes the model.

    Raises:
        InputError: the model is missing, incomplete, of an unknown kind, or does not fit the training or its layout.
    """
    if not isinstance(config.model, str):
        _check_family(config, get_family(config.model.family), config.model.shape)
        embedded_video_config(config.model, config.tokenize.videos)
        return None
    model = ModelDirectory(resolve_hf_dir(config.model))
    model.check_weights(config.execution.model_code_sha256)
    check_template(model)
    end_ids(model.path)
    load_image_config(model, config.tokenize.min_pixels, config.tokenize.max_pixels)
    load_video_config(model, config.tokenize.videos)
    shape = model.shape.for_training(config.train)
    _check_family(config, model.family, shape)
    config.check_parallel(shape)
    model.check_mtp(shape)
    return model


def _check_family(config: PipelineConfig, family: Family, shape: ModelShape) -> None:
    if config.encode_images is not None:
        check_cached(config.train.frozen, config.execution.parallel, family)
    check_training(config.train, config.execution.parallel, family)
    check_adapter(config.train, family, shape)
    _check_beside(config, family, shape)
    check_experts(config.train, config.execution.parallel, shape)
    check_mtp(config.train, config.execution.parallel, shape)
    if config.execution.cluster.is_here:
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


def modules_line(config: PipelineConfig) -> str:
    """Return a line that names the modules with which the training will compute on this host.

    Raises:
        InputError: the recipe asks for modules that are not available here.
    """
    return f"training will use {describe(config.execution.modules, this_host())}"


def first_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines that `plan` and `run` begin with: the modules of the training, and the end that is added to the
    model."""
    if plan.config.execution.cluster.is_here:
        yield modules_line(plan.config)
    if "model" not in plan.given:
        return
    model = opened_model(plan.given["model"])
    token, ends, file = model.family.turn_tokens[-1], end_ids(model.path), model.path / "tokenizer.json"
    for added in read_json(file).get("added_tokens", []) if file.is_file() else []:
        if added["content"] == token and (number := added["id"]) not in ends:
            yield f"trained turns end with {token} ({number}), which the export adds to the model's eos_token_id {ends}"
