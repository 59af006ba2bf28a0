"""Checks that a job fits its model: its layout, and the parts that its settings name. Without torch."""

from dataset_builders.contracts.manifest import load_manifest
from dataset_builders.errors import InputError
from trainer.contract.layout import check_layout
from trainer.contract.model_shape import ModelShape
from trainer.contract.parallel import ParallelConfig
from trainer.contract.pieces import mean_work, pipeline_pieces
from trainer.contract.run import PartConfig, RunConfig, TrainConfig
from trainer.families.family import Family
from trainer.families.registry import read_model


def check_run(run: RunConfig, world_size: int) -> None:
    """`check_layout` and `check_training` for a job whose inputs are on disk.

    Raises:
        InputError: something does not fit, `hf_dir` is not a model, or `bins_dir` is not an artifact of plan_bins.
    """
    plan = load_manifest(run.bins_dir).config
    if "pad_multiple" not in plan:
        raise InputError(f"bins_dir={run.bins_dir} is not an artifact of plan_bins: its manifest has no pad_multiple")
    family, shape = read_model(run.hf_dir)
    check_training(run.train, run.execution.parallel, family)
    check_layout(
        run.execution.parallel,
        shape,
        world_size=world_size,
        global_batch_size=run.train.global_batch_size,
        seq_len=run.seq_len,
        pad_multiple=plan["pad_multiple"],
    )


def pieces_of(run: RunConfig, shape: ModelShape) -> tuple[range, ...]:
    """The language layers of each piece of a job's pipeline, by the plan of its bins."""
    plan = load_manifest(run.bins_dir)
    work = mean_work(run.seq_len, plan.config, plan.stats)
    return pipeline_pieces(shape, run.execution.parallel, work, run.train.frozen)


def check_training(train: TrainConfig, parallel: ParallelConfig, family: Family) -> None:
    """Check that a training's settings are what its family can do, that they name parts that the model has, and that
    one of these is trained.

    Raises:
        InputError: they are not, do not, or all parts are frozen.
    """
    family.check_settings(train, parallel)
    if train.optim.moments == "bfloat16" and parallel.sharding == "fsdp":
        raise InputError(
            "train.optim.moments is bfloat16 and execution.parallel.sharding is fsdp, which divides moments over the "
            "ranks as they are; set train.optim.moments=float32"
        )
    for name, settings in train.parts.items():
        changed = settings.model_dump(exclude_defaults=True)
        if name not in family.parts and settings != PartConfig():
            field, value = next(iter(changed.items()))
            raise InputError(
                f"train.{name}.{field} is {value}, and a {family.model_type} model has no part {name!r}; its parts: "
                f"{', '.join(family.parts)}"
            )
    if all(train.part(name).frozen for name in family.parts):
        names = ", ".join(f"train.{name}.frozen" for name in family.parts)
        raise InputError(f"{names}: nothing is left to train in a {family.model_type} model; make one of them false")
