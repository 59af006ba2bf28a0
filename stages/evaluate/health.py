"""Figures of a set of answers, for any metric: share of stopped answers, share of empty answers, mean length."""

from collections.abc import Callable, Sequence

from stages.evaluate.predictions import Prediction
from stages.shared.scoring.names import HEALTH_NAMES

HEALTH: dict[str, Callable[[Prediction], float]] = {
    "stop_rate": lambda a: a.stopped,  # the cheapest detector of an untrained end-of-turn token
    "empty_rate": lambda a: not a.answer.strip(),
    "mean_answer_tokens": lambda a: a.num_tokens,
}
assert tuple(HEALTH) == HEALTH_NAMES


def health(answers: Sequence[Prediction]) -> dict[str, float]:
    """Return the mean of each figure over a set of answers; ValueError if it is empty."""
    if not answers:
        raise ValueError("no answers to score")
    return {name: sum(metric(answer) for answer in answers) / len(answers) for name, metric in HEALTH.items()}
