"""The sizes of attention that only some families have, in a model with random weights."""

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel


class WithPartialRotation(StrictModel):
    """The field of a family that rotates a part of each head. The class that it extends has the field `head_dim`."""

    later_fields = ("rotary_fraction",)

    rotary_fraction: float = Field(default=1.0, gt=0, le=1, description="share of a language head that is rotated")

    @model_validator(mode="after")
    def _pairs_are_whole(self) -> "WithPartialRotation":
        if (rotated := self.head_dim * self.rotary_fraction) % 2 or not rotated:
            raise ValueError(f"head_dim={self.head_dim} x rotary_fraction={self.rotary_fraction} is no even number")
        return self
