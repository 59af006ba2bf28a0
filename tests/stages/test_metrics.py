"""What is said of every set of answers."""

from dataclasses import dataclass

import pytest

from stages.metrics import HEALTH, health


@dataclass
class Given:
    answer: str
    stopped: bool = True
    num_tokens: int = 1


def test_it_is_the_mean_of_each():
    answers = [
        Given("7"),
        Given("7 and then", stopped=False, num_tokens=4),
        Given("LEFT ", num_tokens=2),
        Given(" ", num_tokens=0),
    ]
    assert health(answers) == {"stop_rate": 0.75, "empty_rate": 0.25, "mean_answer_tokens": 1.75}
    assert list(health(answers)) == list(HEALTH)


def test_no_answers_are_no_score():
    with pytest.raises(ValueError, match="no answers"):
        health([])
