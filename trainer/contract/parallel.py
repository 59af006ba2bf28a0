"""How the ranks share one model: the layout, its memory savers, and the checks that need no model."""

from typing import Literal

from pydantic import Field

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.strict import StrictModel


class ParallelConfig(StrictModel):
    """Execution: how the ranks share one model. Data parallel takes what is left of the world."""

    tp: int = Field(default=1, ge=1, description="tensor parallel size")
    pp: int = Field(default=1, ge=1, description="pipeline parallel size")
    cp: int = Field(default=1, ge=1, description="context parallel size")
    vpp: int = Field(
        default=1, ge=1, description="virtual pipeline stages: pieces of the model each pipeline rank holds"
    )
    sequence_parallel: bool = Field(default=False, description="split norms and dropout over the tensor-parallel ranks")
    first_pipeline_layers: int | None = Field(
        default=None,
        ge=1,
        description="language layers of the first pipeline rank, which also holds vision; null: shared evenly",
    )
    vision_split: Literal["images", "tensor_parallel"] = Field(
        default="images",
        description="how tensor-parallel ranks share the vision encoder: each takes some images whole, or a part of "
        "every matrix; context-parallel ranks share the images either way",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none", description="language activations computed again in backward: none, attention cores, all layers"
    )
    recompute_vision: bool = Field(default=False, description="the same for every layer of the vision encoder")
    sharding: Literal["distributed_optimizer", "fsdp"] = Field(
        default="distributed_optimizer",
        description="what data-parallel ranks divide: optimizer states (megatron-core), or weights too (torch FSDP2)",
    )
    balance: bool = Field(
        default=True, description="deal the bins of a global batch so that ranks and micro batches cost alike"
    )

    @property
    def pad_multiple(self) -> int:
        """What each sample's length in a bin is rounded up to, so that every rank's slice is whole."""
        halves = 2 * self.cp if self.cp > 1 else 1
        return halves * (self.tp if self.sequence_parallel else 1)

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.pp * self.cp

    def check_proved(self) -> None:
        """Refuse the layouts that no test has shown equal to one process yet.

        Raises:
            InputError: a size over 1, or sequence parallel.
        """
        if self.model_size > 1 or self.sequence_parallel:
            raise InputError(
                f"parallel: tp={self.tp}, pp={self.pp}, cp={self.cp}, sequence_parallel={self.sequence_parallel}: only "
                "data parallel is proved equal to one process so far; leave them at 1, 1, 1 and false"
            )
