"""Answers of tables: where an answer appears in a text, and when two values are equal, beyond the golden table."""

import pytest

from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.metrics.denotation import TableExactMatch, final_answer, normalize_item, parse_value

pytestmark = pytest.mark.promise(
    "Every metric gives the recorded numbers of its reference program to 1e-6, and lists each difference with "
    "its reason."
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Rationale: growth.\nComputations: ((9 - 5) / 5)\nAnswer: 80.0%.", "80.0%."),
        ("The answer is 5", "5"),
        ("So the final answer is: 43.99.", "43.99."),
        ("Answer: 3\nbecause 1 + 2", "3"),
        ("Find the mean.\n18 / 3 = 6\nThe mean is 6.", "6."),
        ("Find the price.\nShe spent $1,003.06 there.", "$1,003.06"),
        ("Count them.\nOf 18 apples on pages 3-5 there are 6.", "6."),
        ("Count them.\nIt is on pages 3-5 there.", "5"),
        ("Read the clock.\nThe train leaves at 7:25 P.M.", "7:25 P.M."),
        ("Divide.\nThe probability is $\\frac{16}{95}$.", "16/95."),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text, in_solution=True) == answer


@pytest.mark.parametrize(
    ("item", "amount", "scale"),
    [
        ("($1,234)", -1234, 1),
        ("-$5", -5, 1),
        ("$-5", -5, 1),
        ("\u22125", -5, 1),
        ("12 %", 12, 0.01),
        ("$1.5 million", 1.5, 1e6),
        ("1.2e+04.", 12000, 1),
        (".5", 0.5, 1),
        ("1st", None, 1),
        ("1,23", None, 1),
        ("5/0", None, 1),
        ("2004-05", None, 1),
        ("", None, 1),
    ],
)
def test_numbers(item, amount, scale):
    value = parse_value(item)
    assert (value.amount, value.scale) == (amount, scale)


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ("Nevada, Utah.", "Nevada; Utah", 1),
        ("Nevada, Utah.", "[Nevada, Utah]", 1),
        ("1,000, 2,000.", "2000, 1000", 1),
        ("12%", "1.2", 0),
        ("5 million", "5 billion", 0),
        ("5 km", "5 mi", 0),
        ("Answer: 0.8.", "(9 - 5) / 5\nAnswer: 80%.", 1),
        ("Add.\nThe mean is 6.", "6", 1),
        ("Add.\nThe mean is 6.", "It is 6 apples.", 1),
        ("Read.\nIt leaves at 7:25 P.M.", "8:25 P.M.", 0),
        # Lines that are a list, not a solution.
        ("Oslo\nBergen\nTromso", "Tromso, Oslo, Bergen", 1),
        ("Oslo\nBergen\nTromso", "Tromso", 0),
        ("", "", 1),
        ("", "5", 0),
        ("5", "", 0),
    ],
)
def test_denotation(reference, answer, right):
    assert TableExactMatch().score([Judged(question="", references=(reference,), answer=answer)]) == right


def test_a_text_outside_a_solution_is_all_of_it():
    assert final_answer("The mean of 5 is 6.", in_solution=False) == "The mean of 5 is 6."


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("Smith[1][b]*", "smith"),
        ("[1]", ""),
        ("[b]", "[b]"),
        ("[b][c]", "[b]"),
        ("[[b]", "["),
        ("Bolt (JAM) (2008)", "bolt"),
        (" (JAM)", "(jam)"),
        ("\u201cA\u2013B\u201d [3] (x).", '"a-b" [3] (x)'),
        ("Caf\u00e9  Noir.", "cafe noir"),
        ("***", ""),
        ("*" * 4000 + "x", "*" * 4000 + "x"),
    ],
)
def test_texts_are_evened_out_as_wikitablequestions_does(text, form):
    assert normalize_item(text) == form
