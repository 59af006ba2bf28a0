"""Checks that a job fits its model: the layout, and the parts that the settings name. Loads no torch."""

from collections.abc import Collection

from dataset_builders.contracts.manifest import load_manifest, read_feature_store
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath
from trainer.contract.parallel import ParallelConfig
from trainer.contract.peft import check_start
from trainer.contract.run import PartConfig, RunConfig, TrainConfig
from trainer.model.adapters import check_adapter
from trainer.model.family import Family
from trainer.model.shape import ModelShape
from trainer.plan.layout import check_layout
from trainer.plan.pieces import mean_work, pipeline_pieces

ENCODING_PARTS = ("vision", "merger")  # the parts that turn pixels into image tokens


def check_run(run: RunConfig, world_size: int, family: Family, shape: ModelShape) -> None:
    """Check the layout, the settings and the adapter of a job whose inputs are on disk.

    Args:
        shape: the sizes of the model in this training.
    """
    plan = load_manifest(run.bins_dir)
    if plan.stage != "plan_bins":
        raise InputError(f"bins_dir={run.bins_dir} is an artifact of {plan.stage}; give one of plan_bins")
    if run.features_dir is not None:
        check_cached(run.train.frozen, run.execution.parallel, family)
        _check_features(run.features_dir, run.tokenized_dir)
    check_training(run.train, run.execution.parallel, family)
    if run.adapter_dir is not None:
        check_start(run.adapter_dir, run.train.adapter)
    check_adapter(run.train, family, shape)
    check_experts(run.train, run.execution.parallel, shape)
    check_mtp(run.train, run.execution.parallel, shape)
    check_layout(
        run.execution.parallel,
        shape,
        world_size=world_size,
        global_batch_size=run.train.global_batch_size,
        seq_len=run.seq_len,
        pad_multiple=plan.config["pad_multiple"],
    )


def check_cached(frozen: Collection[str], parallel: ParallelConfig, family: Family) -> None:
    """Check that image features can be computed once, before the training."""
    if parallel.vision != "first_rank":
        raise InputError(
            "encode_images leaves no image to encode in training, and execution.parallel.vision gives them to other "
            "ranks; set execution.parallel.vision=first_rank, or encode_images=null"
        )
    if not family.encoder:
        raise InputError(
            f"encode_images encodes images once, and a {family.model_type} model has no vision encoder for it; set "
            "encode_images=null"
        )
    trained = [part for part in ENCODING_PARTS if part not in frozen]
    if trained:
        raise InputError(
            f"encode_images encodes images once, and train.{trained[0]}.frozen=false changes what they become; set "
            f"{' and '.join(f'train.{part}.frozen=true' for part in trained)}, or encode_images=null"
        )


def _check_features(features_dir: StorePath, tokenized_dir: StorePath) -> None:
    manifest = load_manifest(features_dir)
    read_feature_store(features_dir, manifest.stats)
    encoded, samples = manifest.parents["tokenized"].fingerprint, load_manifest(tokenized_dir).fingerprint
    if encoded != samples:
        raise InputError(
            f"features_dir={features_dir} was made of the samples {encoded}, and tokenized_dir={tokenized_dir} holds "
            f"{samples}; run the encode_images stage with these"
        )


def pieces_of(run: RunConfig, shape: ModelShape) -> tuple[range, ...]:
    """Return the language layers of each piece of a job's pipeline, given the plan of its bins."""
    work = mean_work(run.seq_len, load_manifest(run.bins_dir), run.bins_dir)
    if run.features_dir is not None:
        work = work.without_images()
    return pipeline_pieces(shape, run.execution.parallel, work, run.train.frozen)


def check_training(train: TrainConfig, parallel: ParallelConfig, family: Family) -> None:
    """Check a training's settings: the family supports them, the model has the parts that they name, and at least one
    part is trained."""
    family.check_settings(train, parallel)
    if train.optim.moments == "bfloat16" and parallel.sharding == "fsdp":
        raise InputError(
            "train.optim.moments is bfloat16 and execution.parallel.sharding is fsdp, which divides moments over the "
            "ranks as they are; set train.optim.moments=float32"
        )
    if train.has_float8_base:
        _check_float8_base(train, parallel)
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


def check_experts(train: TrainConfig, parallel: ParallelConfig, shape: ModelShape) -> None:
    """Check the settings of a training of a model with experts, and that no other model has any."""
    settings = train.experts.model_dump(exclude_defaults=True)
    if not shape.language.routes_tokens:
        if settings:
            name, value = next(iter(settings.items()))
            raise InputError(f"train.experts.{name} is {value}, and the model has no experts; remove it")
        if parallel.ep > 1:
            raise InputError(f"execution.parallel.ep is {parallel.ep}, and the model has no experts; set it to 1")
        return
    if parallel.tp > 1 and not parallel.sequence_parallel:
        raise InputError(
            f"execution.parallel.tp is {parallel.tp}, and each of these ranks would compute every token's experts; "
            "set execution.parallel.sequence_parallel=true"
        )
    if train.precision == "float8":
        raise InputError("train.precision is float8, which is not supported with experts; set train.precision=bfloat16")
    if parallel.sharding == "fsdp":
        raise InputError(
            "execution.parallel.sharding is fsdp, which is not supported with experts; set "
            "execution.parallel.sharding=distributed_optimizer"
        )
    if train.experts.coefficient and train.experts.auxiliary_loss == "pooled" and parallel.pp > 1:
        raise InputError(
            f"train.experts.auxiliary_loss is pooled over all layers, which pp={parallel.pp} divides; set "
            "train.experts.auxiliary_loss=layer"
        )


def check_mtp(train: TrainConfig, parallel: ParallelConfig, shape: ModelShape) -> None:
    """Check that a model and a layout allow the training of multi-token prediction, if it is trained."""
    factor = train.mtp_loss_scaling_factor
    for is_wrong, reason in (
        (shape.mtp is None, "this model has none with its own embeddings (mtp_num_hidden_layers=1 in config.json)"),
        (train.adapter is not None, "train.adapter trains adapters alone"),
        (train.language.frozen, "train.language.frozen=true freezes it"),
        (parallel.pp > 1, f"it needs the embeddings beside the last layer, which pp={parallel.pp} puts on two ranks"),
    ):
        if factor and is_wrong:
            raise InputError(
                f"train.mtp_loss_scaling_factor is {factor:g} and trains multi-token prediction, and {reason}; set "
                "train.mtp_loss_scaling_factor=0, which exports its tensors unchanged"
            )


def _check_float8_base(train: TrainConfig, parallel: ParallelConfig) -> None:
    without = "train.adapter.base=train_precision"
    if parallel.sharding == "fsdp":
        raise InputError(
            "train.adapter.base is float8 and execution.parallel.sharding is fsdp, which divides numbers that it can "
            f"cast and not codes of them; set execution.parallel.sharding=distributed_optimizer, or {without}"
        )
    if train.precision == "float8":
        raise InputError(
            "train.adapter.base is float8 and train.precision is float8, which keeps a float8 copy of each weight for "
            f"its products; set train.precision=bfloat16, or {without}"
        )
