"""The configs of evaluate and compare, in a separate file because the metrics' libraries take a second to load."""

from typing import Literal

from pydantic import Field, field_validator

from dataset_builders.contracts.strict import StrictModel
from stages.answer.config import AnswerConfig
from stages.shared.scoring.names import check_overrides


class EvaluateConfig(AnswerConfig):
    """Identity: the questions, and the metrics."""

    later_fields = ("adapter",)

    metrics: dict[str, list[str]] = Field(
        default={}, description="subset -> its metrics, the headline first; other subsets have the metrics of the table"
    )

    adapter: Literal["merged", "beside"] = Field(
        default="merged",
        description="for trained adapters: merged: the merged model answers; beside: the base model answers with the "
        "unmerged adapter, which is not rounded",
    )

    @field_validator("metrics")
    @classmethod
    def _metrics_exist(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        check_overrides(value)
        return value

    @property
    def answer(self) -> AnswerConfig:
        """The fields that determine the answers."""
        return AnswerConfig(**{name: getattr(self, name) for name in AnswerConfig.model_fields})

    @property
    def scoring(self) -> "EvaluateConfig":
        """The fields that determine the scores of given answers."""
        return self.model_copy(update={"adapter": "merged"})


class CompareConfig(StrictModel):
    """Identity: the settings of the intervals."""

    level: float = Field(default=0.95, gt=0, lt=1, description="level of the intervals")
    resamples: int = Field(default=10_000, ge=100, le=10**6, description="how often the answers are drawn again")
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="seed of the draws")
