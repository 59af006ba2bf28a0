"""The sizes of gated delta nets in a model with random weights."""

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel


class DeltaSizes(StrictModel):
    """The gated delta nets of a hybrid decoder."""

    key_heads: int = Field(gt=0, le=1024, description="key heads of a gated delta net")
    value_heads: int = Field(gt=0, le=1024, description="value heads, a multiple of key_heads")
    head_dim: int = Field(ge=8, le=1024, multiple_of=8, description="width of a key and of a value head")
    attention_interval: int = Field(
        gt=0, le=1024, description="interval of attention layers: 4 means every fourth layer"
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> "DeltaSizes":
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}")
        return self


class WithDelta(StrictModel):
    """The field of a family whose decoder has gated delta nets."""

    later_fields = ("delta",)

    delta: DeltaSizes | None = Field(default=None, description="gated delta nets; null: there are none")
