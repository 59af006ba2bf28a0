"""The config of release: the facts of the model card that come from the recipe."""

from typing import Any

from pydantic import Field

from dataset_builders.contracts.strict import StrictModel


class ReleaseConfig(StrictModel):
    """Identity: the facts of the model card that come from the recipe."""

    name: str = Field(description="name of the model")
    base_model: str | None = Field(description="hub name or directory that training started from; null: random weights")
    datasets: list[str] = Field(description="hub names, or descriptions, of the data")
    recipe: dict[str, Any] = Field(description="the whole configuration except where and how it ran")
