"""The settings of how ranks share one model: layout, memory savers, and the checks that need only these settings."""

import math
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from dataset_builders.contracts.strict import StrictModel


class VisionRanks(StrictModel):
    """Ranks that encode images and do nothing else."""

    ranks: int = Field(ge=1, le=1024, description="number of processes, taken from the end")
    tp: int = Field(default=1, ge=1, le=1024, description="ranks that together encode an image: tensor parallel size")


def _vision_kind(value: object) -> str:
    return "(ranks)" if isinstance(value, dict | VisionRanks) else "(name)"


# Tags have brackets, which no field name has, so that messages can leave the tags out.
VisionPlace = Annotated[
    Annotated[Literal["first_rank", "dealt"], Tag("(name)")] | Annotated[VisionRanks, Tag("(ranks)")],
    Discriminator(_vision_kind),
]


class ParallelConfig(StrictModel):
    """Execution: how the ranks share one model. Groups of ranks with whole models are data parallel."""

    tp: int = Field(default=1, ge=1, le=1024, description="tensor parallel size")
    pp: int = Field(default=1, ge=1, le=1024, description="pipeline parallel size")
    cp: int = Field(default=1, ge=1, le=1024, description="context parallel size")
    ep: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="expert parallel size: ranks of the same pipeline rank that divide the experts of each layer",
    )
    vpp: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="virtual pipeline stages: pieces of the model that each pipeline rank holds",
    )
    sequence_parallel: bool = Field(default=False, description="split norms and dropout over the tensor-parallel ranks")
    first_pipeline_layers: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="language layers of the first pipeline rank, which also holds vision; null: chosen so that no rank "
        "costs much more than another",
    )
    vision: VisionPlace = Field(
        default="first_rank",
        description="which ranks encode images: only the first of a pipeline, all ranks of a pipeline (each encodes "
        "some of the images), or ranks that do nothing else",
    )
    vision_split: Literal["images", "tensor_parallel"] = Field(
        default="images",
        description="how tensor-parallel ranks share the vision encoder: each encodes some of the images, or has a "
        "slice of every matrix; context-parallel ranks share the images either way",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="language activations computed again in backward: none, attention cores and gates of experts, all "
        "layers",
    )
    recompute_vision: bool = Field(default=False, description="recompute every layer of the vision encoder in backward")
    sharding: Literal["distributed_optimizer", "fsdp"] = Field(
        default="distributed_optimizer",
        description="data-parallel ranks divide the optimizer states (megatron-core), or the weights too (torch FSDP2)",
    )
    balance: bool = Field(
        default=True, description="deal the bins of a global batch so that ranks and micro batches cost alike"
    )

    @model_validator(mode="after")
    def _fields_fit(self) -> "ParallelConfig":
        """Check what needs neither a model nor a number of processes; layout.py checks the rest."""
        # Allowed are vision_split=tensor_parallel with tp=1, and sharding=fsdp on one rank: the result is that of the
        # default.
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel=true divides what tp ranks else hold whole, and tp=1; try sequence_parallel=false"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} divides what a rank of a pipeline holds, and pp=1; try vpp=1")
        if self.first_pipeline_layers is not None and self.pp == 1:
            raise ValueError(
                f"first_pipeline_layers={self.first_pipeline_layers} leaves the rest to other ranks, and pp=1; "
                "try first_pipeline_layers=null"
            )
        if self.deals_vision and self.vision_split == "tensor_parallel":
            raise ValueError(
                f"vision=dealt gives each of pp={self.pp} ranks whole images, and vision_split=tensor_parallel parts "
                "of matrices; try vision_split=images"
            )
        if self.vision_ranks and self.vision_ranks % self.vision.tp:
            nearest = max(1, round(self.vision_ranks / self.vision.tp)) * self.vision.tp
            raise ValueError(
                f"vision.ranks={self.vision_ranks} is not a multiple of vision.tp={self.vision.tp}; "
                f"try vision.ranks={nearest}"
            )
        if self.vision_ranks and self.vision_split == "tensor_parallel":
            raise ValueError(
                f"vision.ranks={self.vision_ranks} encode whole images, and vision_split=tensor_parallel is for ranks "
                "that share matrices; try vision_split=images"
            )
        if self.vision_ranks and self.sharding == "fsdp":
            raise ValueError(
                f"vision.ranks={self.vision_ranks} get whole weights from one rank, and sharding=fsdp has none with "
                "whole weights; try sharding=distributed_optimizer"
            )
        if self.sharding == "fsdp" and self.model_size > 1:
            raise ValueError(
                f"sharding=fsdp is for data parallel alone, not for tp={self.tp}, pp={self.pp}, cp={self.cp}; "
                "try sharding=distributed_optimizer"
            )
        return self

    @property
    def deals_vision(self) -> bool:
        """Whether several pipeline ranks share the images."""
        return self.vision == "dealt" and self.pp > 1

    @property
    def vision_ranks(self) -> int:
        """Ranks that encode images and do nothing else."""
        return self.vision.ranks if isinstance(self.vision, VisionRanks) else 0

    @property
    def vision_encoders(self) -> int:
        """Copies of the vision encoder on ranks that do nothing else."""
        return self.vision_ranks // self.vision.tp if isinstance(self.vision, VisionRanks) else 0

    def data_parallel(self, processes: int) -> int:
        """Return the model copies in a world of this size. `check_world` checks that the processes divide evenly."""
        return (processes - self.vision_ranks) // self.model_size

    def encoders_of_replica(self, dp: int) -> int:
        """Return the number of vision encoders that serve one of `dp` copies of the language model. It is 1 if there
        are fewer encoders than copies, so that each encoder serves several."""
        return max(1, self.vision_encoders // dp)

    @property
    def pad_multiple(self) -> int:
        """Factor of each sample's length in a bin, so that context-parallel ranks get pieces of whole tokens."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def bin_multiple(self) -> int:
        """Factor of a bin's length: sequence parallel divides a rank's tokens regardless of the samples in the bin."""
        return math.lcm(self.pad_multiple, self.cp * (self.tp if self.sequence_parallel else 1))

    @property
    def model_size(self) -> int:
        """The number of ranks that together hold one copy of the model."""
        return self.tp * self.pp * self.cp
