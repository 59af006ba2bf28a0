"""Which trainings can share one loaded base: they train only adapters, over the same weights in the same layout."""

from collections.abc import Sequence

from dataset_builders.errors import InputError
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import RunConfig, TrainConfig


def why_alone(train: TrainConfig, parallel: ParallelConfig) -> str:
    """Return why a training cannot share its base with other trainings; empty if it can."""
    if train.adapter is None:
        return "train.adapter=null trains the weights themselves"
    if train.adapter.modules_to_save:
        return "train.adapter.modules_to_save trains modules of the base"
    if parallel.sharding == "fsdp":
        return "execution.parallel.sharding=fsdp divides the base together with the adapters"
    if parallel.vision != "first_rank":
        return "execution.parallel.vision gives images to ranks that copy the encoder's weights"
    return ""


def base_settings(train: TrainConfig) -> tuple[object, ...]:
    """Return the settings of a training with adapters that its base depends on: equal for trainings that share one."""
    return train.precision, train.adapter and train.adapter.base, sorted(train.frozen)


def check_sharing(runs: Sequence[RunConfig]) -> None:
    """Check that these runs can share one base.

    Raises:
        InputError: one of them cannot, or has another base.
    """
    for run in runs:
        if why := why_alone(run.train, run.execution.parallel):
            raise InputError(f"{run.output_dir} cannot share a base: {why}; train it by itself")
        if _base_of(run) != _base_of(runs[0]):
            raise InputError(
                f"{run.output_dir} and {runs[0].output_dir} cannot share a base: they differ in the model, the bins, "
                "the layout, train.precision, train.adapter.base or the frozen parts; train each by itself"
            )


def _base_of(run: RunConfig) -> tuple[object, ...]:
    data = (run.tokenized_dir, run.bins_dir, run.features_dir, run.seq_len)
    return run.hf_dir, run.base_digest, data, run.execution, run.num_threads, base_settings(run.train)
