"""The steps of a pipeline: every stage with its settings, its inputs, and the resources that it holds while it runs.

A new stage needs a folder in stages/ and one line in `make_steps`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from pydantic import BaseModel

from flows.pipeline.config import PipelineConfig
from flows.pipeline.host import this_host
from stages.convert.config import RAW
from stages.encode_images.config import EncodingConfig
from stages.release.config import ReleaseConfig
from stages.shared.artifacts.artifact import Artifact, Input, Stage, StageResult
from stages.shared.inputs.config import (
    EmbeddedDataConfig,
    EmbeddedEasyVqaConfig,
    EmbeddedMovesConfig,
    EmbeddedShapesConfig,
)
from stages.shared.inputs.model_directory import opened_model, processor_input

PREPARE_DATA, TRAIN, EVALUATE = FLOWS = ("prepare-data", "vlm-sft", "evaluate")


class Needs(enum.Flag):
    """The resources that a stage holds while it runs."""

    NOTHING = 0
    WORKERS = enum.auto()  # workers of the Dask cluster, if there is one
    SLOT = enum.auto()  # a slot of the concurrency limit of the machine that runs its jobs, since they use GPUs
    METRICS = enum.auto()  # a listener to its metrics.jsonl


@dataclass(eq=False, slots=True)
class Step:
    """A stage in the pipeline of one recipe.

    Attributes:
        flow: the flow that runs it, one of FLOWS.
        name: name of its Prefect task, of its row in the closing table and of its pages. A stage that runs twice has
            two steps with different names.
        config: the stage's identity config.
        inputs: role -> what is read in this role: an external input, or the step that makes it.
        beside: name of a step that may run at the same time, which begins when this one's inputs are there; empty: this
            step runs alone.
        artifact: the finished artifact, as soon as there is one.
        result: how this run came by the artifact; None if it was found without a run.
    """

    flow: str
    name: str
    stage: Stage
    config: BaseModel
    inputs: Mapping[str, "Step | Input"]
    needs: Needs = Needs.NOTHING
    beside: str = ""
    artifact: Artifact | None = None
    result: StageResult | None = None

    def missing(self) -> "Step | None":
        """Return the first step whose artifact this one reads and which has none yet."""
        steps = (item for item in self.inputs.values() if isinstance(item, Step))
        return next((step for step in steps if step.artifact is None), None)

    def read(self) -> dict[str, Input]:
        """Return role -> input. Every step that this one reads has its artifact."""
        inputs = {role: item.artifact if isinstance(item, Step) else item for role, item in self.inputs.items()}
        if isinstance(processor := inputs.get("processor"), Artifact):
            # The weights of an embedded model have no influence on the tokens, so their identity leaves them out.
            inputs["processor"] = processor_input(opened_model(processor))
        return inputs


def make_steps(config: PipelineConfig, given: Mapping[str, Input]) -> list[Step]:
    """Return the steps of a configuration in the order in which they run.

    Args:
        given: name -> external input, see `Plan.given`.
    """
    # The stages import libraries that take seconds; the checks of a recipe come before that.
    from stages.answer import stage as answer
    from stages.compare import stage as compare
    from stages.contamination import stage as contamination
    from stages.convert import stage as convert
    from stages.embedded_data import digits, easy_vqa, moves, shapes
    from stages.embedded_model import stage as tiny_model
    from stages.encode_images import stage as encode_images
    from stages.evaluate import stage as evaluate
    from stages.export import stage as export
    from stages.plan_bins import stage as plan_bins
    from stages.release import stage as release
    from stages.tokenize import stage as tokenize
    from stages.train import stage as train
    from stages.verify import stage as verify

    steps: list[Step] = []

    def add(
        flow: str,
        name: str,
        module: ModuleType,
        config: BaseModel,
        needs: Needs = Needs.NOTHING,
        beside: str = "",
        **inputs: Step | Input | None,
    ) -> Step:
        there = {role: item for role, item in inputs.items() if item is not None}
        steps.append(Step(flow, name, module.STAGE, config, there, needs, beside))
        return steps[-1]

    # Raw rows -> sample shards -> tokenized shards -> bins.
    step = partial(add, PREPARE_DATA)
    raw = {role: given[role] for role in config.sources}
    if isinstance(config.data, BaseModel):
        drawn = {
            EmbeddedDataConfig: digits,
            EmbeddedEasyVqaConfig: easy_vqa,
            EmbeddedShapesConfig: shapes,
            EmbeddedMovesConfig: moves,
        }
        raw = {RAW: step("embedded_data", drawn[type(config.data)], config.data, Needs.WORKERS)}
    samples = step("convert", convert, config.convert_config, Needs.WORKERS, **raw)
    model, processor = given.get("model"), given.get("processor")
    if isinstance(config.model, BaseModel):
        model = processor = step("embedded_model", tiny_model, config.model, Needs.WORKERS, samples=samples)
    seen = None
    if config.contamination is not None:
        seen = step(
            "contamination", contamination, config.contamination, Needs.WORKERS, beside="tokenize", samples=samples
        )
    tokens = step("tokenize", tokenize, config.tokenize, Needs.WORKERS, samples=samples, processor=processor)
    bins = step("plan_bins", plan_bins, config.plan_bins_config, Needs.WORKERS, tokenized=tokens)

    # Bins and weights -> checkpoints -> an HF directory.
    step = partial(add, TRAIN)
    start = {"model": model, "tokenized": tokens}
    features = None
    if config.encode_images is not None:
        precision = "float32" if config.train.precision == "float32" else "bfloat16"  # as the encoder has in training
        encoding = EncodingConfig(**config.encode_images.model_dump(), precision=precision)
        features = step("encode_images", encode_images, encoding, Needs.SLOT, **start)
    learnt_from = {**start, "bins": bins, "features": features, "adapter": given.get("adapter")}
    trained = step("train", train, config.train, Needs.SLOT | Needs.METRICS, **learnt_from)
    exported = step("export", export, config.export, Needs.SLOT, train=trained, **start)

    # The answers and scores of the export and of the model before training, the answers of other programs, the
    # comparison, and the release with its model card.
    step = partial(add, EVALUATE)
    before = {"hf": model, "samples": samples, "tokenized": tokens}
    tuned = {"hf": exported, "samples": samples}
    if config.evaluate.adapter == "beside":
        tuned = {**before, "adapter": exported}
    answers = step("answer", answer, config.evaluate.answer, Needs.SLOT, **tuned)
    verified = compared = None
    if config.verify is not None:
        loaded = {"export": exported, "model": model, "answers": answers, "samples": samples}
        verified = step("verify", verify, config.verify, Needs.SLOT, **loaded)
    scored = {"samples": samples, "contamination": seen}
    scores = step("evaluate", evaluate, config.evaluate.scoring, answers=answers, **scored, made_by=trained)
    if config.compare is not None:
        # A GPU has no room for the training and the answers.
        has_room = config.execution.cluster.is_here and not this_host().gpu
        beside = "train" if has_room else ""
        of_base = step("answer_base", answer, config.evaluate.answer, Needs.SLOT, beside=beside, **before)
        base = step("evaluate_base", evaluate, config.evaluate.scoring, answers=of_base, **scored, start_of=trained)
        compared = step("compare", compare, config.compare, base=base, tuned=scores, samples=samples)
    made = {"export": exported, "train": trained, "evaluate": scores, **scored, "verify": verified, "compare": compared}
    step("release", release, release_config(config), **made)
    return steps


def release_config(config: PipelineConfig) -> ReleaseConfig:
    """Return the facts about the run for the model card."""
    return ReleaseConfig(
        name=config.mlflow_name,
        base_model=config.model if isinstance(config.model, str) else None,
        datasets=list(config.sources.values()) or ["embedded_data (made by athanor)"],
        recipe=config.identity(),
    )
