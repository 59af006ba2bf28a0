"""The sizes of experts in a model with random weights."""

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel


class ExpertSizes(StrictModel):
    """The experts of a decoder's layers."""

    count: int = Field(gt=0, le=4096, description="experts of a layer")
    top_k: int = Field(gt=0, le=4096, description="experts of a token, at most count")
    width: int = Field(gt=0, le=2**18, description="width of an expert's gated MLP")
    shared_width: int = Field(default=0, ge=0, le=2**18, description="width of the shared expert; 0: there is none")
    dense_layers: tuple[int, ...] = Field(default=(), description="layers with an MLP in place of experts")

    @model_validator(mode="after")
    def _experts_suffice(self) -> "ExpertSizes":
        if self.top_k > self.count:
            raise ValueError(f"top_k={self.top_k} is more than count={self.count}")
        return self


class WithExperts(StrictModel):
    """The field of a family whose decoder has experts."""

    later_fields = ("experts",)

    experts: ExpertSizes | None = Field(default=None, description="experts; null: there are none")
