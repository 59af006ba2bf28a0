"""RegistryConfig: when a trained model is registered, and when it becomes champion. It enters no fingerprint."""

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel


class Gate(StrictModel):
    """Bounds of a score within which the model is registered."""

    min: float | None = Field(default=None, allow_inf_nan=False, description="refused below it")
    max: float | None = Field(
        default=None, allow_inf_nan=False, description="refused above it, for scores that are better low"
    )
    min_gain: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="refused unless the interval of the gain over the model before training lies above it",
    )

    @model_validator(mode="after")
    def _says_something(self) -> "Gate":
        if self.min is self.max is self.min_gain is None:
            raise ValueError("a gate without min, max and min_gain refuses nothing; give one of them")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min={self.min} is above max={self.max}: every model would be refused")
        return self


class RegistryConfig(StrictModel):
    """A model that passes the gates is registered and gets the alias `candidate`; one that beats the champion by the
    margin gets `champion`."""

    metric: str = Field(
        default="exact_match",
        min_length=1,
        description="score that is compared, higher is better: a metric's name, or metric/subset",
    )
    margin: float = Field(default=0.005, ge=0, le=10**6, description="by how much a version must beat the champion")
    gates: dict[str, Gate] = Field(
        default={}, description="metric, or metric/subset -> its bounds; a model outside them is not registered"
    )
    push_to: str | None = Field(
        default=None,
        pattern="^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="owner/name on the hub to which a model that passes the gates is pushed; null: nowhere",
    )
    push_private: bool = Field(default=True, description="whether a repository made by the push is private")
