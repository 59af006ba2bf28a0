"""Figures of every set of answers."""

import pytest

from stages.evaluate.evaluation import HEALTH, health
from stages.evaluate.predictions import Prediction


def prediction(answer: str, stopped: bool = True, num_tokens: int = 1) -> Prediction:
    texts = {"key": "a/1", "question": "?", "reference": "7", "references": ("7",), "answer": answer}
    return Prediction(turn=0, stopped=stopped, num_tokens=num_tokens, **texts)


def test_it_is_the_mean_of_each():
    answers = [
        prediction("7"),
        prediction("7 and then", stopped=False, num_tokens=4),
        prediction("LEFT ", num_tokens=2),
        prediction(" ", num_tokens=0),
    ]
    assert health(answers) == {"stop_rate": 0.75, "empty_rate": 0.25, "mean_answer_tokens": 1.75}
    assert list(health(answers)) == list(HEALTH)


def test_no_answers_are_no_score():
    with pytest.raises(ValueError, match="no answers"):
        health([])
