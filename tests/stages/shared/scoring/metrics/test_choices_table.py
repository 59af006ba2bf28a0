"""Answers to multiple choice questions, judged by hand: choices_by_hand.yaml holds the table."""

from pathlib import Path

import pytest
import yaml

from stages.shared.scoring.metrics.choices import MultipleChoice, choose, parse_options
from stages.shared.scoring.metrics.contract import Judged

pytestmark = pytest.mark.promise(
    "An answer to a multiple choice question counts only where one option is meant, by 150 answers judged by hand."
)

BY_HAND = yaml.safe_load((Path(__file__).parent / "choices_by_hand.yaml").read_text(encoding="utf-8"))


def test_the_table_is_as_large_as_it_says():
    meant = [line[2] for line in BY_HAND["answers"]]
    assert len(meant) >= 150 and meant.count(None) >= 40


@pytest.mark.parametrize(("options", "answer", "meant"), BY_HAND["answers"])
def test_the_option_that_is_meant(options, answer, meant):
    assert choose(answer, BY_HAND["options"][options]) == meant


@pytest.mark.parametrize(("question", "options"), BY_HAND["questions"])
def test_the_options_of_a_question_in_full_width(question, options):
    assert parse_options(question) == options


@pytest.mark.parametrize(("question", "reference", "answer", "score"), BY_HAND["scores"])
def test_the_score_of_an_answer_in_full_width(question, reference, answer, score):
    assert MultipleChoice().score([Judged(question=question, references=(reference,), answer=answer)]) == score
