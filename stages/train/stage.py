"""train: RunConfig -> run.json -> launcher -> result.json; metrics.jsonl is followed while the trainer runs.

    checkpoints/step-000500/ ...   run.json  result.json  metrics.jsonl  report.json  report.html
    heldout.jsonl  heldout-base.jsonl   the loss of every held-out sample: newest, and before the first step
    logs/trainer.log  logs/rank-0001.log ...   job.sbatch  slurm-end   the last two only for a SLURM job
    profile/rank-0.json.gz  profile/rank-0.md   if steps are traced

A rerun in the same scratch directory starts the trainer again, which resumes from its newest checkpoint. A finished
training whose newest checkpoint is damaged is rerun in the same way.
"""

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dataset_builders.contracts.manifest import fingerprint, load_manifest
from dataset_builders.errors import InputError
from dataset_builders.storage.store import absolute, local_dir
from stages.shared.artifacts.artifact import Artifact, Input, Stage, StageOutput, stage_identity
from stages.shared.artifacts.workers import StageResources
from stages.shared.inputs.model_directory import hf_dir_of, opened_model
from stages.shared.pages.report import Drawing, Section, Table, write_report
from stages.shared.pages.shown_numbers import show_share, show_value
from stages.train.run_trainer import run_trainer
from trainer.contract.checkpoint import check_checkpoint
from trainer.contract.names import HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.result import LAYERS, MetricsRow, read_metrics
from trainer.contract.run import RunConfig, TrainConfig
from trainer.model.adapters import adapter_sizes
from trainer.model.family import Family
from trainer.model.shape import ModelShape
from trainer.plan.checks import check_run
from trainer.plan.pieces import mean_work
from trainer.plan.placement import Placement, PlacementJob, current_placement

VERSION = 3  # 2: heldout-base.jsonl; 3: the axes of the curves have names


@dataclass(frozen=True, slots=True)
class _Curve:
    """One plot of fields of MetricsRow over the steps: field -> name of its line, name of the y axis."""

    lines: Mapping[str, str]
    y_label: str
    is_log: bool = False


_LOSSES = {"loss": "training", "heldout_loss": "held-out", "mtp_loss": "multi-token prediction"}
# Title on the page -> its plot.
_CURVES = {
    "Loss": _Curve(_LOSSES, "nats, mean of the loss tokens", is_log=True),
    "Learning rate": _Curve({"lr": "optim.lr"}, "learning rate"),
    "Gradient norm before clipping": _Curve({"grad_norm": "all ranks"}, "norm", is_log=True),
    "Tokens per second": _Curve({"tokens_per_second": "all ranks"}, "tokens a second"),
}
# Grey on a transparent background is readable on a light and on a dark page.
_GREYS = dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color"), "#7d8798")


def train(config: TrainConfig, inputs: Mapping[str, Input], work_dir: Path, resources: StageResources) -> StageOutput:
    """Run the stage. Inputs: "model" (HF directory), "tokenized", "bins"; optionally "features" of the images if they
    were encoded before, and "adapter" if the training continues one."""
    features, trained = inputs.get("features"), inputs["model"].parent().fingerprint
    if isinstance(features, Artifact) and (encoder := features.manifest.parents["model"].fingerprint) != trained:
        raise InputError(
            f"{features.dir} holds features by the model {encoder}, and the training begins with {trained}; run the "
            "encode_images stage with this model"
        )
    run = make_run_config(config, inputs, work_dir, resources)
    model = opened_model(inputs["model"])
    family, shape = model.family, model.shape.for_training(run.train)
    check_run(run, resources.cluster.processes, family, shape)
    result = run_trainer(run, resources, STAGE.name)
    rows = read_metrics(work_dir)
    stats = {
        "steps": result.step,
        "loss": result.loss,
        "heldout_loss": result.heldout_loss,
        "checkpoint": result.checkpoint,
        "tokens": rows[-1].tokens if rows else None,
        "loss_tokens": rows[-1].loss_tokens if rows else None,
        "epochs": rows[-1].epoch if rows else None,
    }
    write_train_report(work_dir, rows, stats, predict(run, resources.cluster.processes, family, shape))
    return StageOutput(stats=stats)


def make_run_config(
    config: TrainConfig, inputs: Mapping[str, Input], output_dir: Path, resources: StageResources
) -> RunConfig:
    return RunConfig(
        task="train",
        fingerprint=fingerprint(stage_identity(STAGE, config, inputs)),
        hf_dir=hf_dir_of(inputs["model"]).resolve(),
        tokenized_dir=absolute(inputs["tokenized"].dir),
        bins_dir=absolute(inputs["bins"].dir),
        features_dir=absolute(inputs["features"].dir) if "features" in inputs else None,
        adapter_dir=local_dir(inputs["adapter"].dir).resolve() if "adapter" in inputs else None,
        base_digest=digest_of_base(inputs["model"]),
        output_dir=output_dir.resolve(),
        seq_len=inputs["bins"].manifest.config["seq_len"],
        train=config.for_bins(inputs["bins"].manifest.stats["num_bins"]["train"]),
        execution=resources.trainer,
        num_threads=resources.cluster.num_threads,
    )


def digest_of_base(model: Input) -> str:
    """Return `RunConfig.base_digest` of a model: the digest of an external model, or its artifact's fingerprint."""
    parent = model.parent()
    return f"{parent.name}@{parent.fingerprint}"


def predict(run: RunConfig, processes: int, family: Family, shape: ModelShape) -> Placement | None:
    """Predict the costs of a step; None if no images are encoded, or in float32, for which no rate is known."""
    plan = load_manifest(run.bins_dir)
    job = PlacementJob(
        shape=shape,
        parallel=run.execution.parallel,
        train=run.train,
        processes=processes,
        seq_len=run.seq_len,
        max_patches=plan.config.get("max_patches", 0),
        work=mean_work(run.seq_len, plan, run.bins_dir),
        is_cached=run.features_dir is not None,
        adapters=adapter_sizes(run.train, family, shape),
    )
    return current_placement(job) if job.vision and run.train.precision != "float32" else None


def check_training(training: Artifact, digest: Callable[[Path, Callable[[Path], str]], str]) -> None:
    """Check the newest checkpoint of a finished training, which an export reads; DamagedFile if a file was changed, or
    it is of another step or training. `digest`: see `DigestCache.digest`."""
    # The files of a checkpoint are in no manifest, because they depend on the layout.
    manifest = training.manifest
    check_checkpoint(training.dir / manifest.stats["checkpoint"], digest, manifest.fingerprint)


def write_train_report(
    directory: Path,
    rows: Sequence[MetricsRow],
    stats: dict[str, Any],
    prediction: Placement | None = None,
) -> None:
    """Write report.json of a training to `directory`.

    Args:
        prediction: the predicted costs of a step, if there is a prediction.
    """
    summary = {name: value for name, value in stats.items() if value is not None}
    sections: list[Section] = []
    if rows:
        summary["tokens_per_second"] = round(statistics.median(row.tokens_per_second for row in rows), 1)
        reported = tuple(name for name in rows[-1].model_extra if name.startswith(LAYERS))
        of_layers = {"Figures of the layers": _Curve({name: name for name in reported}, "value")}
        shown = _CURVES | (of_layers if reported else {})
        sections += [_drawing(title, rows, curve) for title, curve in shown.items()]
        sections += [_time_table(rows), *([_prediction_table(rows, prediction)] if prediction else [])]
    write_report(directory, title="Training", summary=summary, sections=sections)


def _drawing(title: str, rows: Sequence[MetricsRow], curve: _Curve) -> Drawing:
    """Return the lines of a curve that the rows have, as a drawing, and in words where each begins and ends."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for field, name in curve.lines.items():
        points = [(row.step, value) for row in rows if (value := getattr(row, field, None)) is not None]
        lines |= {name: points} if points else {}
    ends = [f"{name} from {show_value(points[0][1])} to {show_value(points[-1][1])}" for name, points in lines.items()]
    shows = f"{title} over the steps {rows[0].step:,} to {rows[-1].step:,}: {', '.join(ends)}"
    return Drawing(title, _curve_svg(lines, curve), shows)


def _curve_svg(lines: Mapping[str, Sequence[tuple[int, float]]], curve: _Curve) -> str:
    """Return an SVG file of lines, name -> (step, value); the same lines give the same bytes."""
    with matplotlib.rc_context({"svg.hashsalt": "athanor", "font.size": 9, **_GREYS}):
        figure = Figure(figsize=(7, 2.6), layout="constrained")
        axes = figure.add_subplot()
        for name, points in lines.items():
            marker = "o" if len(points) < 30 else None
            axes.plot(*zip(*points), label=name, marker=marker, markersize=3, linewidth=1.2)
        if curve.is_log and all(value > 0 for line in axes.get_lines() for value in line.get_ydata()):
            axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(curve.y_label)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    return text.getvalue()


def _time_table(rows: Sequence[MetricsRow]) -> Table:
    whole = statistics.median(row.step_seconds for row in rows)
    names = ["data_seconds", *(name for name in rows[-1].model_extra if name.endswith("_seconds")), "optimizer_seconds"]
    parts = [(name, statistics.median(getattr(row, name, 0.0) for row in rows)) for name in names]
    lines = [(name, round(seconds, 4), round(seconds / whole, 3) if whole else None) for name, seconds in parts]
    return Table("Where a step's time goes (medians)", ("part", "seconds", "fraction"), lines)


def _prediction_table(rows: Sequence[MetricsRow], prediction: Placement) -> Table:
    """Return a table of the plan's prediction and the measurement on rank 0. Rank 0's clock counts its waiting time for
    other ranks as the language model's time."""
    first = prediction.ranks[0]
    waiting = prediction.step - first.vision - first.language
    predicted = {
        "vision_seconds": first.vision,
        "language_seconds": first.language + waiting,
        "step_seconds": prediction.step,
    }
    lines = [
        (name, float(f"{seconds:.3g}"), float(f"{statistics.median(getattr(row, name, 0.0) for row in rows):.3g}"))
        for name, seconds in predicted.items()
    ]
    memory = sum(prediction.memory.values()) / 1e9
    lines.append(("memory_gb", float(f"{memory:.3g}"), float(f"{max(row.memory_gb for row in rows):.3g}")))
    title = f"What the plan predicted for an H200: rank 0, {show_share(waiting / prediction.step)} of the step waiting"
    return Table(title, ("", "predicted", "measured (medians, memory the most)"), lines)


STAGE = Stage("train", VERSION, train, on_disk=True, digested=(HELDOUT_JSONL, HELDOUT_BASE_JSONL), check=check_training)
