"""Figures of every set of answers, whatever its metric: how many ended, how many are empty, how long they are."""

from collections.abc import Callable, Sequence

from stages.evaluate.predictions import Prediction

HEALTH: dict[str, Callable[[Prediction], float]] = {
    "stop_rate": lambda a: a.stopped,  # the cheapest detector of an end-of-turn token that was not learnt
    "empty_rate": lambda a: not a.answer.strip(),
    "mean_answer_tokens": lambda a: a.num_tokens,
}


def health(answers: Sequence[Prediction]) -> dict[str, float]:
    """The mean of each figure over a set of answers.

    Raises:
        ValueError: there are no answers; a mean over nothing is not a score.
    """
    if not answers:
        raise ValueError("no answers to score")
    return {name: sum(metric(answer) for answer in answers) / len(answers) for name, metric in HEALTH.items()}
