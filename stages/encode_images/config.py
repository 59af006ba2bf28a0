"""The config of encode_images: the storage of features, and the arithmetic that computes them."""

from typing import Literal

from pydantic import Field

from dataset_builders.contracts.manifest import FeatureType
from dataset_builders.contracts.strict import StrictModel


class EncodeImagesConfig(StrictModel):
    """The storage settings of image features."""

    dtype: FeatureType = Field(
        description="type of the stored numbers; that of train.precision loses nothing, bfloat16 of a training in "
        "float32 a 256th of a number at most"
    )
    shard_size_mb: float = Field(
        default=256.0, gt=0, le=1e6, description="a shard of features takes about this many MB"
    )


class EncodingConfig(EncodeImagesConfig):
    """Identity: the recipe's settings, and the arithmetic that the training uses for the encoder."""

    precision: Literal["float32", "bfloat16"] = Field(description="arithmetic of the encoder")
