"""The config of contamination: which images count as copies."""

from pydantic import Field

from dataset_builders.contracts.strict import StrictModel

MAX_BITS = 7  # the most that `copies.near_pairs` can find


class ContaminationConfig(StrictModel):
    """The limits within which two images are nearly the same. Error rates: tests/bench/results/near_copies.md."""

    max_bits: int = Field(
        default=6, ge=0, le=MAX_BITS, description="bits of 64 in which the perceptual hashes of two copies may differ"
    )
    max_difference: float = Field(
        default=12.0,
        ge=0,
        le=255,
        description="grey levels (root mean square of 255) by which the 32 x 32 thumbnails of two copies may differ, "
        "beside brightness and contrast",
    )
    max_apart: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="how far apart two copies may be at their own size; 1 is the largest difference that a copy had",
    )
    max_looks: int = Field(
        default=8,
        ge=1,
        le=1000,
        description="train images, the most alike first, that a held-out image is compared with",
    )
