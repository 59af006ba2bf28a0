"""TrackingConfig: what MLflow gets. RegistryConfig: when a trained model is registered, and when it becomes champion;
whether its scores pass the gates.

Nothing here enters a fingerprint.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel

ArtifactLevel = Literal["references", "small", "all"]


class TrackingConfig(StrictModel):
    """What MLflow gets of a run."""

    artifacts: ArtifactLevel = Field(
        default="small",
        description="files that are uploaded. small: of every stage all but shards, checkpoints and weights, which are "
        "named with size and digest, and a registered model with its weights; all: everything; references: pages "
        "alone, for a server that shares this disk",
    )


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
    margin, and surely, gets `champion` (see `flows.tracking.registry.decide`)."""

    metric: str = Field(
        default="exact_match",
        min_length=1,
        description="score that is compared, higher is better: a metric's name, or metric/subset",
    )
    margin: float = Field(default=0.005, ge=0, le=10**6, description="by how much a version must beat the champion")
    min_answers: int = Field(
        default=10, ge=1, le=10**9, description="least number of answers behind the score of a champion"
    )
    other_heldout: Literal["candidate", "champion"] = Field(
        default="candidate",
        description="what a version becomes whose held-out samples are not the champion's, so that no score compares "
        "them: candidate alone, or champion",
    )
    gates: dict[str, Gate] = Field(
        default={}, description="metric, or metric/subset -> its bounds; a model outside them is not registered"
    )
    push_to: str | None = Field(
        default=None,
        pattern="^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="owner/name on the hub to which a model that passes the gates is pushed; null: nowhere",
    )
    push_private: bool = Field(default=True, description="whether a repository made by the push is private")


def refusals(
    gates: Mapping[str, Gate], scores: Mapping[str, float], gains: Mapping[str, tuple[float, float]] | None = None
) -> list[str]:
    """One line per gate that failed; empty if the model passes all of them. A missing score fails its gate.

    Args:
        scores: name, as the gates spell it, -> value.
        gains: the same names -> low and high end of the interval of the gain over the model before training, in the
            direction that is better; None if there was no comparison.
    """
    failures = []
    for name, gate in gates.items():
        failures += _on_score(name, gate, scores)
        if gate.min_gain is not None:
            failures += _on_gain(name, gate.min_gain, gains)
    return failures


def _on_score(name: str, gate: Gate, scores: Mapping[str, float]) -> list[str]:
    if gate.min is None and gate.max is None:
        return []
    value = scores.get(name)
    if value is None:
        return [f"{name} was not measured; there are {', '.join(scores) or 'no scores'}"]
    if gate.min is not None and not value >= gate.min:
        return [f"{name} {value:.4f} is below {gate.min:g}"]
    if gate.max is not None and not value <= gate.max:
        return [f"{name} {value:.4f} is above {gate.max:g}"]
    return []


def _on_gain(name: str, least: float, gains: Mapping[str, tuple[float, float]] | None) -> list[str]:
    if gains is None or name not in gains:
        return [f"{name} was not compared with the model before training"]
    low, high = gains[name]
    if low > least:
        return []
    return [f"the gain in {name}, {low:+.4f} to {high:+.4f}, does not lie above {least:g}"]
