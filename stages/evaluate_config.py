"""What evaluate and compare are told. Apart from them, because the libraries of the metrics take a second to load."""

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field, field_validator

from dataset_builders.contracts.strict import StrictModel
from stages.answer_parts import AnswerConfig
from stages.scoring.names import check_overrides


class EvaluateConfig(AnswerConfig):
    """Identity: what is asked of the model, and how its answers are scored."""

    metrics: dict[str, list[str]] = Field(
        default={}, description="subset -> names of its metrics, the first its headline; others have those of the table"
    )

    @field_validator("metrics")
    @classmethod
    def _metrics_exist(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        check_overrides(value)
        return value

    @property
    def answer(self) -> AnswerConfig:
        """The part that decides the answers."""
        return AnswerConfig(**{name: getattr(self, name) for name in AnswerConfig.model_fields})


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateResources:
    """Execution: who hears of it.

    Attributes:
        on_progress: called as (done, total) in held-out samples after each window; done never goes back.
    """

    on_progress: Callable[[int, int], None] | None = None

    def report(self, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(done, total)


class CompareConfig(StrictModel):
    """Identity: how sure is sure."""

    level: float = Field(default=0.95, gt=0, lt=1, description="of the intervals")
    resamples: int = Field(default=10_000, ge=100, description="times that the answers are drawn again")
    seed: int = Field(default=0, ge=0, description="of the draws")
