"""Options in questions, and which option an answer takes."""

import pytest

from stages.shared.scoring.metrics.choices import MultipleChoice, choose, parse_options
from stages.shared.scoring.metrics.contract import Judged

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)

SCIENCE = (
    "Lecture: Two kinds:\nA. solids\nB. liquids\nQuestion: Which?\nHint: look\nChoices:\n"
    "A. Oxygen\nB. Carbon dioxide\nC. Nitrogen\nAnswer with the letter."
)
TAXI = (
    "What is he awaiting?\nPick the correct solution from the four options below to address the question.\n"
    "Options: Skateboarder, train, delivery, cab."
)


def judged(question, reference, answer):
    return Judged(question=question, references=(reference,), answer=answer)


@pytest.mark.parametrize(
    ("question", "options"),
    [
        (SCIENCE, {"A": "Oxygen", "B": "Carbon dioxide", "C": "Nitrogen"}),
        ("Which?\nA: cat\nB: dog", {"A": "cat", "B": "dog"}),
        ("Which?\nA) cat\nB) dog", {"A": "cat", "B": "dog"}),
        ("Which?\n(A) cat\n(B) dog", {"A": "cat", "B": "dog"}),
        ("Which?\n  [A] cat\n  [B] dog", {"A": "cat", "B": "dog"}),
        ("Which?\nChoice A. cat\nChoice B. dog\n", {"A": "cat", "B": "dog"}),
        ("Which?\na. cat\nb. dog", {"A": "cat", "B": "dog"}),
        ("Which? A) cat  B) a dog (C) bird", {"A": "cat", "B": "a dog", "C": "bird"}),
        ("Which?\nOptions: (A) cat (B) dog", {"A": "cat", "B": "dog"}),
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


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("b.", "B"),
        ("\\boxed{B}", "B"),
        ("**Answer:** B", "B"),
        ("Answer: carbon dioxide", "B"),
        ("Answer: B\nRationale: A plant needs it, and C does not.", "B"),
        ("A. Oxygen", "A"),
        ("B. Not C.", "B"),
        ("A is right", "A"),
        ("A plant", None),
        ("I think so", None),
        ("I think B", "B"),
        ("B or C", None),
        ("Option A is wrong, so the answer is C", "C"),
        ("the correct option is C, not A", "C"),
        ("The answer is A. No, I was wrong: the answer is C, since B is a solid", "C"),
        ("The gas is nitrogen", "C"),
        ("oxygen or nitrogen", None),
        ("D", None),
        ("Because", None),
        ("", None),
        ("Nitrogen is part of the air around us. " * 3, None),
    ],
)
def test_option_of_an_answer(answer, letter):
    assert choose(answer, {"A": "Oxygen", "B": "Carbon dioxide", "C": "Nitrogen"}) == letter


def test_an_option_whose_text_is_inside_anothers():
    options = {"A": "Dioxide", "B": "Carbon dioxide", "C": "Carbon"}
    assert choose("It is carbon dioxide", options) == "B"
    assert choose("It is carbon", options) == "C"


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
    ],
)
def test_questions_of_other_forms(question, reference, answer, score, unparsed):
    answers = [judged(question, reference, answer)]
    assert MultipleChoice().score(answers) == score
    assert MultipleChoice().unparsed(answers).tolist() == [unparsed]
