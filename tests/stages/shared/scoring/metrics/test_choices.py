"""Options in questions, and which option an answer takes: choices_by_hand.yaml holds the answers judged by hand."""

from pathlib import Path

import pytest
import yaml

from stages.shared.scoring.metrics.choices import MultipleChoice, choose, parse_options
from stages.shared.scoring.metrics.contract import Judged

pytestmark = [
    pytest.mark.promise(
        "An answer to a multiple choice question counts only where one option is meant, by 150 answers judged by hand."
    ),
    pytest.mark.promise(
        "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
        "its reason."
    ),
]

BY_HAND = yaml.safe_load((Path(__file__).parent / "choices_by_hand.yaml").read_text(encoding="utf-8"))
SCIENCE = (
    "Lecture: Two kinds:\nA. solids\nB. liquids\nQuestion: Which?\nHint: look\nChoices:\n"
    "A. Oxygen\nB. Carbon dioxide\nC. Nitrogen\nAnswer with the letter."
)
TAXI = (
    "What is he awaiting?\nPick the correct solution from the four options below to address the question.\n"
    "Options: Skateboarder, train, delivery, cab."
)


def judged(question: str, reference: str, answer: str) -> Judged:
    return Judged(question=question, references=(reference,), answer=answer)


@pytest.mark.parametrize(("options", "answer", "meant"), BY_HAND["answers"])
def test_the_option_that_is_meant(options, answer, meant):
    assert choose(answer, BY_HAND["options"][options]) == meant


def test_the_table_is_as_large_as_it_says():
    meant = [line[2] for line in BY_HAND["answers"]]
    assert len(meant) >= 150 and meant.count(None) >= 40


@pytest.mark.parametrize(
    ("question", "options"),
    [
        *BY_HAND["questions"],
        (SCIENCE, {"A": "Oxygen", "B": "Carbon dioxide", "C": "Nitrogen"}),
        ("Which?\nA) cat\nB) dog", {"A": "cat", "B": "dog"}),
        ("Which?\n  [A] cat\n  [B] dog", {"A": "cat", "B": "dog"}),
        ("Which?\na. cat\nb. dog", {"A": "cat", "B": "dog"}),
        ("Which? A) cat  B) a dog (C) bird", {"A": "cat", "B": "a dog", "C": "bird"}),
        ("Which?\nA.\nB.\nC.", {"A": "", "B": "", "C": ""}),
        ("Which?\nA.cat\nB.dog", {"A": "cat", "B": "dog"}),
        ("Which?\n- A. cat\n- B. dog", {"A": "cat", "B": "dog"}),
        ("Which?\n**A.** cat\n**B.** dog", {"A": "cat", "B": "dog"}),
        ("Which?\nA. cat\nC. dog", {}),
        ("Which?\nA. cat", {}),
        (TAXI, {"A": "Skateboarder", "B": "train", "C": "delivery", "D": "cab"}),
        ("What is in the picture?\nGive a very brief answer.", {}),
        ("", {}),
    ],
)
def test_options_of_a_question(question, options):
    assert parse_options(question) == options


def test_unparsed_answers_are_wrong_and_counted():
    answers = [judged(SCIENCE, "Answer: B", said) for said in ("B", "C", "B or C", "", "It gives carbon dioxide")]
    assert MultipleChoice().statistics(answers)[:, 0].tolist() == [1, 0, 0, 0, 1]
    assert MultipleChoice().unparsed(answers).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize(
    ("question", "reference", "answer", "score", "unparsed"),
    [
        # Options without letters; the answer has a rationale.
        (TAXI, "Cab.", "cab", 1, False),
        (TAXI, "Answer: cab.\nRationale: He is in transit.", "Answer: cab.\nRationale: He has luggage.", 1, False),
        (TAXI, "Answer: cab.\nRationale: The train left.", "Answer: train.\nRationale: He has a cab.", 0, False),
        (TAXI, "Cab.", "a bus", 0, True),
        # Options in the image.
        ("Solve that puzzle by choosing the appropriate letter.", "A", "A", 1, False),
        ("Solve that puzzle by choosing the appropriate letter.", "A", "", 0, True),
        ("Solve that puzzle by choosing the appropriate letter.", "C", "The answer is D.", 0, False),
        # No options at all.
        ("Does this image finalize the logical sequence? Yes or No?", "Yes.", "yes", 1, False),
        ("Fill in the blank. There are (_) cats.", "4", "4.", 1, False),
        ("Fill in the blank. There are (_) cats.", "4", "five", 0, False),
        *([*line, False] for line in BY_HAND["scores"]),
    ],
)
def test_questions_of_other_forms(question, reference, answer, score, unparsed):
    answers = [judged(question, reference, answer)]
    assert MultipleChoice().score(answers) == score
    assert MultipleChoice().unparsed(answers).tolist() == [unparsed]
