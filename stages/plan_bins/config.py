"""The config of plan_bins: the limits of a bin, and the amount of each subset in an epoch."""

from dataclasses import dataclass

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel


class SubsetMix(StrictModel):
    """The amount of a subset that is trained on."""

    weight: float | None = Field(
        default=None,
        gt=0,
        le=10**9,
        description="its share of an epoch's tokens among the weighted subsets; null: no share",
    )
    repeats: float = Field(
        default=1, gt=0, le=1000, description="times a sample appears in an epoch; with a weight: at most"
    )
    fraction: float = Field(default=1, gt=0, le=1, description="share of its samples that is used, always the same")
    max_samples: int | None = Field(
        default=None, gt=0, le=10**9, description="samples per epoch at most, repeats counted"
    )


@dataclass(frozen=True, slots=True)
class BinLimits:
    """The limits of a bin."""

    seq_len: int
    max_patches: int
    max_images: int | None
    pad_multiple: int


class PlanBinsConfig(StrictModel):
    """Identity of the bins, in addition to the tokenized samples."""

    later_fields = ("shares",)

    seq_len: int = Field(gt=0, le=2**24, description="tokens a bin holds")
    max_patches: int = Field(gt=0, le=2**26, description="vision patches a bin holds, before merging")
    max_images: int | None = Field(
        default=None, gt=0, le=2**24, description="images and pairs of frames a bin holds; null: any number"
    )
    pad_multiple: int = Field(gt=0, le=2**16, description="each sample's tokens are rounded up to a multiple of this")
    mixture: dict[str, SubsetMix] = Field(
        default={}, description="how much of each subset an epoch takes; a subset that is not named: all of it, once"
    )
    shares: dict[str, float] = Field(
        default={},
        description="share of an epoch's tokens of each named source of `data`, in proportion; from `data`, where it "
        "lists several sources",
    )
    epochs: int = Field(
        default=1, gt=0, le=10**4, description="epochs with a draw of their own, if draws differ; then they start over"
    )

    @model_validator(mode="after")
    def _whole(self) -> "PlanBinsConfig":
        if self.seq_len % self.pad_multiple:
            down = self.seq_len // self.pad_multiple * self.pad_multiple
            raise ValueError(
                f"seq_len={self.seq_len} is not a multiple of pad_multiple={self.pad_multiple}; "
                f"try {down or self.pad_multiple}"
            )
        return self

    @property
    def limits(self) -> BinLimits:
        return BinLimits(self.seq_len, self.max_patches, self.max_images, self.pad_multiple)
