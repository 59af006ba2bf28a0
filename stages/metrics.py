"""Metrics of generated answers: what they mean, and their means over a set of answers."""

from collections.abc import Callable, Sequence
from typing import Protocol


class ScoredAnswer(Protocol):
    """What the metrics look at.

    Attributes:
        reference: what the data says.
        answer: what the model said, without special tokens.
        stopped: an end-of-turn token came before the answer was cut.
        num_tokens: generated tokens, without the end-of-turn token.
    """

    reference: str
    answer: str
    stopped: bool
    num_tokens: int


def normalize(text: str) -> str:
    """Lower case, no white space at the ends, each run of white space inside made one space.

    Nothing else: punctuation, accents, articles, number words and how a number is written all count.
    """
    return " ".join(text.lower().split())


def exact_match(answer: str, reference: str) -> bool:
    """Whether both texts are the same after `normalize`."""
    return normalize(answer) == normalize(reference)


METRICS: dict[str, Callable[[ScoredAnswer], float]] = {
    "exact_match": lambda a: exact_match(a.answer, a.reference),
    "stop_rate": lambda a: a.stopped,  # the cheapest detector of an end-of-turn token that was not learnt
    "empty_rate": lambda a: not a.answer.strip(),
    "mean_answer_tokens": lambda a: a.num_tokens,
}


def score(answers: Sequence[ScoredAnswer]) -> dict[str, float]:
    """The mean of every metric over a set of answers.

    Raises:
        ValueError: for no answers at all: a mean over nothing is no score.
    """
    if not answers:
        raise ValueError("no answers to score")
    return {name: sum(metric(answer) for answer in answers) / len(answers) for name, metric in METRICS.items()}
