"""The embedded rows are right and deterministic, and their images form small groups."""

import dataclasses
from collections import Counter

import pytest
from sklearn.datasets import load_digits

from dataset_builders.sources.embedded import (
    EVEN_QUESTION,
    FIVE_QUESTION,
    LARGER_QUESTION,
    NEXT_QUESTION,
    NUM_SCANS,
    SINGLE_QUESTIONS,
    SUBSETS,
    WORD_QUESTION,
    WORDS,
    DigitCounts,
    iter_digit_rows,
)
from stages.shared.inputs.config import EmbeddedDataConfig

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

COUNTS = DigitCounts(scans=NUM_SCANS, multi=400, pairs=400, texts=300, words=50)


def rows_by_subset(seed, counts):
    found = {subset: [] for subset in SUBSETS}
    for subset, row in iter_digit_rows(seed, counts):
        found[subset].append(row)
    return found


@pytest.fixture(scope="module")
def rows():
    return rows_by_subset(0, COUNTS)


@pytest.fixture(scope="module")
def label_of(rows):
    """Return PNG bytes -> digit, by the order of scikit-learn's own labels."""
    labels = load_digits().target
    return {row["images"][0]["bytes"]: int(label) for row, label in zip(rows["digits_single"], labels)}


def images(row):
    return [image["bytes"] for image in row["images"]]


def test_every_scan_is_a_picture_of_its_own_and_every_text_another(rows, label_of):
    assert {subset: len(found) for subset, found in rows.items()} == dict(zip(SUBSETS, (1797, 400, 400, 300, 50)))
    assert len(label_of) == NUM_SCANS
    assert len({row["texts"][0]["user"] for row in rows["digits_text"]}) == 300
    assert all(row["images"] == [] for row in rows["digits_text"])


@pytest.mark.parametrize(
    ("subset", "questions"),
    [
        ("digits_single", SINGLE_QUESTIONS),
        ("digits_multi", (*SINGLE_QUESTIONS, EVEN_QUESTION, FIVE_QUESTION, NEXT_QUESTION)),
        ("digits_words", (WORD_QUESTION,)),
    ],
)
def test_answers_about_one_scan_are_right(subset, questions, rows, label_of):
    for row in rows[subset]:
        digit = label_of[images(row)[0]]
        right = dict.fromkeys(SINGLE_QUESTIONS, str(digit)) | {
            EVEN_QUESTION: ["even", "odd"][digit % 2],
            FIVE_QUESTION: "yes" if digit > 5 else "no",
            NEXT_QUESTION: str(digit + 1),
            WORD_QUESTION: WORDS[digit],
        }
        assert all(text["assistant"] == right[text["user"]] for text in row["texts"])
        assert (len(row["texts"]) > 1) == (subset == "digits_multi")
    assert {text["user"] for row in rows[subset] for text in row["texts"]} == set(questions)


def test_rows_of_before_there_were_words_are_the_same(rows):
    before = list(iter_digit_rows(0, dataclasses.replace(COUNTS, words=0)))
    assert before == [(subset, row) for subset in SUBSETS[:4] for row in rows[subset]]
    assert "num_words" not in EmbeddedDataConfig(seed=0).model_dump()
    assert EmbeddedDataConfig(seed=0, num_words=3).model_dump()["num_words"] == 3


def test_pairs_are_right_and_no_scan_is_in_two(rows, label_of):
    uses = Counter(image for row in rows["digits_compare"] for image in images(row))
    assert set(uses.values()) == {1}
    for row in rows["digits_compare"]:
        first, second = (label_of[image] for image in images(row))
        for text in row["texts"]:
            larger = "first" if first > second else "second"
            assert text["assistant"] == (larger if text["user"] == LARGER_QUESTION else f"{first} {second}")
    assert {text["user"] for row in rows["digits_compare"] for text in row["texts"]} > {LARGER_QUESTION}


def test_same_seed_same_rows_other_seed_other_rows():
    few = DigitCounts(scans=40, multi=10, pairs=10, texts=10)
    assert list(iter_digit_rows(3, few)) == list(iter_digit_rows(3, few))
    assert list(iter_digit_rows(3, few)) != list(iter_digit_rows(4, few))


def test_a_subsets_size_does_not_change_the_others():
    one = rows_by_subset(3, DigitCounts(scans=40, multi=10, pairs=10, texts=10))
    other = rows_by_subset(3, DigitCounts(scans=40, multi=5, pairs=0, texts=10))
    assert one["digits_single"] == other["digits_single"] and one["digits_text"] == other["digits_text"]
    assert one["digits_multi"][:5] == other["digits_multi"] and other["digits_compare"] == []
