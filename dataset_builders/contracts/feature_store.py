"""The header of stored image features. This module loads no array library, so that a recipe check can import it."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath

FeatureType = Literal["bfloat16", "float32"]
ITEM_BYTES: dict[FeatureType, int] = {"bfloat16": 2, "float32": 4}


class FeatureStore(StrictModel):
    """The storage format of an artifact's image features: stats["features"] of its manifest."""

    format_version: Literal[1] = 1
    dtype: FeatureType = Field(description="type of the numbers")
    width: int = Field(gt=0, description="numbers of an image token: its own, then those of each deepstack level")

    @property
    def token_bytes(self) -> int:
        return self.width * ITEM_BYTES[self.dtype]


def read_feature_store(directory: StorePath, stats: Mapping[str, Any]) -> FeatureStore:
    """Return the `FeatureStore` of an artifact, from its manifest's stats."""
    try:
        return FeatureStore.model_validate(stats.get("features"))
    except ValidationError as error:
        raise InputError(
            f"{directory / 'manifest.json'}: stats.features is not of format_version 1, which this code reads; give "
            "features_dir an artifact of the encode_images stage"
        ) from error
