"""train: RunConfig -> run.json -> launcher -> result.json; metrics.jsonl is followed while the trainer runs.

    checkpoints/step-000500/ ...   run.json  result.json  metrics.jsonl  report.json  report.html
    heldout.jsonl  heldout-base.jsonl   the loss of every held-out sample: newest, and before the first step
    logs/trainer.log  logs/rank-0001.log ...   job.sbatch  slurm-end   the last two only for a SLURM job
    profile/rank-0.json.gz  profile/rank-0.md   if steps are traced

A rerun in the same scratch directory starts the trainer again, which resumes from its newest checkpoint. A finished
training whose newest checkpoint is damaged is rerun in the same way.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from dataset_builders.contracts.manifest import fingerprint, load_manifest
from dataset_builders.errors import InputError
from dataset_builders.storage.store import absolute, local_dir
from stages.shared.artifacts.artifact import Artifact, Input, Stage, StageOutput, stage_identity
from stages.shared.artifacts.workers import StageResources
from stages.shared.inputs.model_directory import hf_dir_of, opened_model
from stages.train.report import write_train_report
from stages.train.run_trainer import run_trainer
from trainer.contract.checkpoint import check_checkpoint
from trainer.contract.names import HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.result import read_metrics
from trainer.contract.run import RunConfig, TrainConfig
from trainer.model.adapters import adapter_sizes
from trainer.model.family import Family
from trainer.model.shape import ModelShape
from trainer.plan.checks import check_run
from trainer.plan.pieces import mean_work
from trainer.plan.placement import Placement, PlacementJob, current_placement

VERSION = 2  # 2: heldout-base.jsonl


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


def train(config: TrainConfig, inputs: Mapping[str, Input], work_dir: Path, resources: StageResources) -> StageOutput:
    """Run the stage. Inputs: "model" (HF directory), "tokenized", "bins"; optionally "features" of the images if they
    were encoded before, and "adapter" if the training continues one."""
    _check_encoder(inputs)
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
        work=mean_work(run.seq_len, plan.config, plan.stats),
        is_cached=run.features_dir is not None,
        adapters=adapter_sizes(run.train, family, shape),
    )
    return current_placement(job) if job.vision and run.train.precision != "float32" else None


def _check_encoder(inputs: Mapping[str, Input]) -> None:
    """Check that the features were computed with the model that is trained."""
    features, model = inputs.get("features"), inputs["model"].parent()
    encoder = features.manifest.parents["model"] if isinstance(features, Artifact) else model
    if encoder.fingerprint != model.fingerprint:
        raise InputError(
            f"{features.dir} holds features by the model {encoder.fingerprint}, and the training begins with "
            f"{model.fingerprint}; run the encode_images stage with this model"
        )


def check_training(training: Artifact, digest: Callable[[Path, Callable[[Path], str]], str]) -> None:
    """Check the newest checkpoint of a finished training, which an export reads; DamagedFile if a file was changed, or
    it is of another step or training. `digest`: see `Whole.digest`."""
    # The files of a checkpoint are in no manifest, because they depend on the layout.
    manifest = training.manifest
    check_checkpoint(training.dir / manifest.stats["checkpoint"], digest, manifest.fingerprint)


STAGE = Stage("train", VERSION, train, on_disk=True, digested=(HELDOUT_JSONL, HELDOUT_BASE_JSONL), check=check_training)
