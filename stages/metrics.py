"""What is said of every set of answers, whatever its metric: did they end, are they there, how long are they."""

from collections.abc import Callable, Sequence
from typing import Protocol


class Generated(Protocol):
    """What these look at.

    Attributes:
        answer: what the model said, without special tokens.
        stopped: an end-of-turn token came before the answer was cut.
        num_tokens: generated tokens, without the end-of-turn token.
    """

    answer: str
    stopped: bool
    num_tokens: int


HEALTH: dict[str, Callable[[Generated], float]] = {
    "stop_rate": lambda a: a.stopped,  # the cheapest detector of an end-of-turn token that was not learnt
    "empty_rate": lambda a: not a.answer.strip(),
    "mean_answer_tokens": lambda a: a.num_tokens,
}


def health(answers: Sequence[Generated]) -> dict[str, float]:
    """The mean of each over a set of answers.

    Raises:
        ValueError: for no answers at all: a mean over nothing is no score.
    """
    if not answers:
        raise ValueError("no answers to score")
    return {name: sum(metric(answer) for answer in answers) / len(answers) for name, metric in HEALTH.items()}
