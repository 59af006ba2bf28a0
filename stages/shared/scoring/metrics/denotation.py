"""Denotation accuracy: equality of values, whatever the spelling of numbers and the order of lists.

The text after the last "Answer:" or "answer is" counts. Without such a mark, if the reference is a solution of several
lines that ends in a sentence, the last number of the answer's last line counts; otherwise the whole answer counts. The
counted text is a list of items, separated by semicolons, bars, line ends, or commas before a space.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from stages.shared.scoring.metrics.contract import Judged, MeanMetric

_MARKER = re.compile(r"\banswer(?: is:?|:)\s*", re.I)
_SEPARATOR = re.compile(r"\s*[;|\n]\s*|,\s+")
_LATEX_FRACTION = re.compile(r"\$?\\frac\{(-?[\d.,]+)\}\{([\d.,]+)\}\$?")

_QUOTES = {ord(mark): "'" for mark in "\u2018\u2019\u00b4`"} | {ord(mark): '"' for mark in "\u201c\u201d"}
_DASHES = {code: "-" for code in (0x2010, 0x2011, 0x2012, 0x2013, 0x2014, 0x2212)}
_FOOTNOTE_MARKS = "\u2022\u2666\u2020\u2021*#+"
_QUOTED = re.compile(r'^"([^"]*)"$')

_SCALES = {"%": 0.01, "percent": 0.01, "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)(?:e[-+]?\d+)?"
_CURRENCY = "[$\u20ac\u00a3\u00a5]"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?){_CURRENCY}?(?P<inner>[-+]?)(?P<digits>{_DIGITS})(?:/(?P<under>{_DIGITS}))?"
    rf"(?: ?(?P<scale>%|percent|thousand|million|billion|trillion))?(?: (?P<unit>[a-z]+(?: [a-z]+)?))?"
)
_TIME = r"\d{1,2}:\d{2}(?: ?[ap]\.m\.)?"
_NUMBER_WITHIN = re.compile(rf"{_TIME}|(?:(?<![\w.])-)?(?:{_CURRENCY}-?)?{_DIGITS}(?:/{_DIGITS})?%?", re.I)
_SENTENCE_WORDS = 4
_DATE = re.compile(r"(\d{1,4}|xx|xxxx)-(\d{1,2}|xx)-(\d{1,2}|xx)")
_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Value:
    """One item of an answer."""

    text: str  # normalised
    amount: float | None = None  # the number in it, without its scale; None for other texts
    scale: float = 1.0  # the factor of the number: 0.01 for a percent sign, 1e6 for "million", else 1
    unit: str = ""  # the words after the number
    date: tuple[int, int, int] | None = None  # year, month, day, -1 for one that is not given; None: not a date

    @property
    def identity(self) -> tuple[float, str] | tuple[int, int, int] | str:
        """A value that is equal for items with the same meaning: the date, the number as written, or the text."""
        return self.date or (self.text if self.amount is None else (self.amount * self.scale, self.unit))

    def is_same_number(self, other: "Value") -> bool:
        """Whether both are the same number; one side may leave out a scale or a unit."""
        if self.amount is None or other.amount is None or (self.unit and other.unit and self.unit != other.unit):
            return False
        if _is_close(self.amount * self.scale, other.amount * other.scale):
            return True
        return 1.0 in (self.scale, other.scale) and _is_close(self.amount, other.amount)


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-12, abs_tol=_TOLERANCE)


def normalize_item(text: str) -> str:
    """Return lower case without accents, citations, final details in brackets, outer quotes and one full stop."""
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if unicodedata.category(c) != "Mn")
    text, before = text.translate(_QUOTES).translate(_DASHES), None
    while text != before:
        before = text
        text = _without_details(_without_citations(text.strip()).strip())
        text = _QUOTED.sub(r"\1", text.strip())
    return " ".join(text.removesuffix(".").lower().split())


def _without_citations(text: str) -> str:
    """Return the text without final footnote marks and "[...]". Brackets around all the text stay, except a number."""
    while True:
        shorter = text.rstrip(_FOOTNOTE_MARKS)
        start = _last_group(shorter, "[", "]")
        if start == 0 and not shorter[1:-1].isdecimal():
            start = shorter.find("[", 1)
        shorter = shorter[:start] if start >= 0 else shorter
        if shorter == text:
            return text
        text = shorter


def _without_details(text: str) -> str:
    """Return the text without " (...)" at the end."""
    while (start := _last_group(text, " (", ")")) > 0:
        text = text[:start]
    return text


def _last_group(text: str, opening: str, closing: str) -> int:
    """Return the start of the longest group that ends with the text and is closed only there; -1 if there is none."""
    # No regular expression: a pattern that may repeat before the end takes quadratic time if a model repeats itself.
    return text.find(opening, text.rfind(closing, 0, -1) + 1) if text.endswith(closing) else -1


def parse_value(item: str) -> Value:
    """Parse an item of an answer: its text, and its number or date if it has one."""
    text = normalize_item(item)
    # Before details in brackets are removed: (1,234) is a loss.
    bare = " ".join(item.translate(_DASHES).strip().removesuffix(".").lower().split())
    loss = bare.startswith("(") and bare.endswith(")")
    number = _NUMBER.fullmatch(bare[1:-1].strip() if loss else bare) or _NUMBER.fullmatch(text)
    if number:
        amount = float(number["digits"].replace(",", ""))
        under = float(number["under"].replace(",", "")) if number["under"] else 1.0
        if under:
            negative = loss or "-" in (number["sign"], number["inner"])
            scale = _SCALES[number["scale"]] if number["scale"] else 1.0
            return Value(text, (-amount if negative else amount) / under, scale, number["unit"] or "")
    date = _DATE.fullmatch(text)
    if date:
        year, month, day = (-1 if part.startswith("x") else int(part) for part in date.groups())
        if month <= 12 and day <= 31 and month and day:
            return Value(text, date=(year, month, day))
    return Value(text)


def is_solution(text: str) -> bool:
    """Whether a text has several lines, the last of which is a sentence, and no mark of the answer."""
    *before, last = text.strip().split("\n")
    is_sentence = last.endswith(".") and len(last.split()) >= _SENTENCE_WORDS
    return bool(before) and is_sentence and not _MARKER.search(text)


def final_answer(text: str, in_solution: bool) -> str:
    """Return the answer that a text gives; in a solution without a mark, the last number of the last line."""
    text = _LATEX_FRACTION.sub(r"\1/\2", text.strip())
    marked = _MARKER.split(text)[-1].strip()
    if marked and marked != text:
        return marked.split("\n")[0]
    last = text.split("\n")[-1].strip()
    if not in_solution or not last:
        return text
    numbers = _NUMBER_WITHIN.findall(last)
    return numbers[-1] if numbers else last


def parse_items(text: str) -> list[Value]:
    """Return the values of an answer, each once."""
    text = text.strip()
    if text.startswith("[") and text.rstrip(".").endswith("]"):
        text = text.rstrip(".")[1:-1]
    items = [item for item in _SEPARATOR.split(text) if item.strip(" .")]
    return list({value.identity: value for value in map(parse_value, items)}.values())


def is_same_denotation(reference: Sequence[Value], answer: Sequence[Value]) -> bool:
    """Whether both have the same number of values, and each value of the reference is in the answer."""
    if len(reference) != len(answer):
        return False
    identities = {value.identity for value in answer}
    return all(
        value.identity in identities or any(value.is_same_number(other) for other in answer) for value in reference
    )


class TableExactMatch(MeanMetric):
    """The share of answers that give the same values as a reference."""

    name = "denotation_accuracy"
    definition = (
        "1 where the answer holds as many distinct values as a reference and all of the reference's are among them: "
        "the same text (no case, accents, citations, final full stop), or the same number to 1e-6 (thousands "
        "separators, currency signs, brackets for a loss, fractions, percent, thousand to trillion; a scale or a unit "
        "may be left out on one side), or the same date; else 0; the mean over answers"
    )
    source = (
        "Pasupat and Liang, WikiTableQuestions, evaluator.py 1.0.2 for texts, numbers, dates and lists; scales and "
        "brackets as in TAT-QA tatqa_utils.py to_number; last numbers of solutions and fractions as TabMWP's "
        "utilities.py. Ours reads the list from one text, and takes a number with a scale or unit for the bare one, "
        "because questions name them"
    )

    def score_one(self, answer: Judged) -> float:
        return float(any(_gives(answer.answer, reference) for reference in answer.references))


def _gives(answer: str, reference: str) -> bool:
    """Whether an answer gives the values of a reference, which decides whether both are read as solutions."""
    in_solution = is_solution(reference)
    right = parse_items(final_answer(reference, in_solution))
    return is_same_denotation(right, parse_items(final_answer(answer, in_solution)))
