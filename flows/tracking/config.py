"""TrackingConfig: the files that are uploaded to MLflow. RegistryConfig: the conditions under which a trained model is
registered and becomes champion. `refusals`: the check of a model's scores against the gates.

None of these settings is part of a fingerprint.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field, field_validator, model_validator

from dataset_builders.contracts.strict import StrictModel
from stages.shared.scoring.names import check_score

ArtifactLevel = Literal["references", "small", "all"]


class TrackingConfig(StrictModel):
    """The files of a run that are uploaded to MLflow."""

    artifacts: ArtifactLevel = Field(
        default="small",
        description="files that are uploaded. small: all files of every stage except shards, checkpoints and weights, "
        "which are only listed with size and digest, and a registered model with its weights; all: all files; "
        "references: only pages, for a server that shares this disk",
    )


class Gate(StrictModel):
    """Bounds of a score. A model with a score outside them is not registered."""

    min: float | None = Field(default=None, allow_inf_nan=False, description="a model with a lower score is refused")
    max: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="a model with a higher score is refused, such as an error rate or mean_answer_tokens",
    )
    min_gain: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="a model is refused unless the interval of its gain over the model before training is above it",
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
        description="score by which models are compared, where higher is better: a metric's name, or metric/subset",
    )
    margin: float = Field(
        default=0.005, ge=0, le=10**6, description="least difference by which a version must beat the champion's score"
    )
    min_answers: int = Field(
        default=10, ge=1, le=10**9, description="least number of answers behind the score of a champion"
    )
    other_heldout: Literal["candidate", "champion"] = Field(
        default="candidate",
        description="alias of a version with other held-out samples than the champion, so that their scores cannot be "
        "compared: only candidate, or also champion",
    )
    gates: dict[str, Gate] = Field(
        default={},
        description="score or score/subset -> its bounds; a model outside them is not registered. "
        "same_answers is the share of answers that other programs give alike",
    )
    push_to: str | None = Field(
        default=None,
        pattern="^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$",
        description="hub repository (owner/name) to which a model that passes the gates is pushed; null: none",
    )
    push_private: bool = Field(default=True, description="whether a repository made by the push is private")

    @field_validator("metric", "gates")
    @classmethod
    def _scores_exist(cls, value: str | dict[str, Gate]) -> str | dict[str, Gate]:
        for name in [value] if isinstance(value, str) else value:
            check_score(name)
        return value


def refusals(
    gates: Mapping[str, Gate],
    scores: Mapping[str, float],
    gains: Mapping[str, tuple[float, float]] | None = None,
    why: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return one line per gate that failed; [] if the model passes all gates. A missing score fails its gate.

    Args:
        scores: name of a score, as the gates spell it -> value.
        gains: the same names -> low and high end of the interval of the gain over the model before training, positive
            if the trained model is better; None if there was no comparison.
        why: the same names -> the cause of a low score, which is added to the line.
    """
    failures = []
    for name, gate in gates.items():
        value, line = scores.get(name), ""
        if value is None and (gate.min is not None or gate.max is not None):
            line = f"{name} was not measured; there are {', '.join(scores) or 'no scores'}"
        elif gate.min is not None and not value >= gate.min:  # also if the score is not a number
            line = f"{name} {value:.4f} is below {gate.min:g}"
        elif gate.max is not None and not value <= gate.max:
            line = f"{name} {value:.4f} is above {gate.max:g}"
        if line:
            failures.append(": ".join(filter(None, (line, why.get(name)))))
        if gate.min_gain is None:
            continue
        if gains is None or name not in gains:
            failures.append(f"{name} was not compared with the model before training")
        elif not gains[name][0] > gate.min_gain:
            low, high = gains[name]
            failures.append(f"the gain in {name}, {low:+.4f} to {high:+.4f}, does not lie above {gate.min_gain:g}")
    return failures
