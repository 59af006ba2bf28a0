"""The embedded rows are right and deterministic, and their images form small groups."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from sklearn.datasets import load_digits

from dataset_builders.pictures.images import open_rgb
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


@pytest.fixture(scope="module")
def rows():
    found = {subset: [] for subset in SUBSETS}
    for subset, row in iter_digit_rows(0, COUNTS):
        found[subset].append(row)
    return found


@pytest.fixture(scope="module")
def label_of(rows):
    """Return PNG bytes -> digit, by the order of scikit-learn's own labels."""
    labels = load_digits().target
    return {row["images"][0]["bytes"]: int(label) for row, label in zip(rows["digits_single"], labels)}


def images(row):
    return [image["bytes"] for image in row["images"]]


def test_every_scan_is_a_picture_of_its_own(rows, label_of):
    assert {subset: len(found) for subset, found in rows.items()} == dict(zip(SUBSETS, (1797, 400, 400, 300, 50)))
    assert len(label_of) == NUM_SCANS
    for row in rows["digits_single"]:
        assert row["texts"][0]["assistant"] == str(label_of[images(row)[0]])


def test_digits_are_spelled(rows, label_of):
    for row in rows["digits_words"]:
        assert row["texts"][0] == {
            "user": WORD_QUESTION,
            "assistant": WORDS[label_of[images(row)[0]]],
            "source": "digits",
        }
    assert {row["texts"][0]["assistant"] for row in rows["digits_words"]} == set(WORDS)


def test_rows_of_before_there_were_words_are_the_same(rows):
    before = list(iter_digit_rows(0, dataclasses.replace(COUNTS, words=0)))
    assert before == [(subset, row) for subset in SUBSETS[:4] for row in rows[subset]]
    assert "num_words" not in EmbeddedDataConfig(seed=0).model_dump()
    assert EmbeddedDataConfig(seed=0, num_words=3).model_dump()["num_words"] == 3


def test_answers_about_one_scan_are_right(rows, label_of):
    for row in rows["digits_multi"]:
        digit = label_of[images(row)[0]]
        right = dict.fromkeys(SINGLE_QUESTIONS, str(digit)) | {
            EVEN_QUESTION: ["even", "odd"][digit % 2],
            FIVE_QUESTION: "yes" if digit > 5 else "no",
            NEXT_QUESTION: str(digit + 1),
        }
        assert len(row["texts"]) > 1
        assert all(text["assistant"] == right[text["user"]] for text in row["texts"])


def test_pairs_are_right_and_no_scan_is_in_two(rows, label_of):
    uses = Counter(image for row in rows["digits_compare"] for image in images(row))
    assert set(uses.values()) == {1}
    for row in rows["digits_compare"]:
        first, second = (label_of[image] for image in images(row))
        for text in row["texts"]:
            larger = "first" if first > second else "second"
            assert text["assistant"] == (larger if text["user"] == LARGER_QUESTION else f"{first} {second}")
    assert {text["user"] for row in rows["digits_compare"] for text in row["texts"]} > {LARGER_QUESTION}


def test_text_rows_all_differ(rows):
    questions = [row["texts"][0]["user"] for row in rows["digits_text"]]
    assert len(set(questions)) == len(questions)
    assert all(row["images"] == [] for row in rows["digits_text"])


def test_sizes_differ_and_the_paper_is_white(rows):
    pictures = [np.asarray(open_rgb(images(row)[0])) for row in rows["digits_single"][:300]]
    sizes = {picture.shape[:2] for picture in pictures}
    assert len(sizes) > 20 and any(h != w for h, w in sizes)
    assert min(min(size) for size in sizes) >= 32
    assert all(picture[0, 0, 0] > 200 and picture.min() < 60 for picture in pictures)


def test_same_seed_same_rows_other_seed_other_rows():
    few = DigitCounts(scans=40, multi=10, pairs=10, texts=10)
    assert list(iter_digit_rows(3, few)) == list(iter_digit_rows(3, few))
    assert list(iter_digit_rows(3, few)) != list(iter_digit_rows(4, few))


def test_a_subsets_size_does_not_change_the_others():
    one = dict.fromkeys(SUBSETS)
    for counts in (
        DigitCounts(scans=40, multi=10, pairs=10, texts=10),
        DigitCounts(scans=40, multi=5, pairs=0, texts=10),
    ):
        found = {subset: [] for subset in SUBSETS}
        for subset, row in iter_digit_rows(3, counts):
            found[subset].append(row)
        one = found if one["digits_single"] is None else one
    assert one["digits_single"] == found["digits_single"] and one["digits_text"] == found["digits_text"]
    assert one["digits_multi"][:5] == found["digits_multi"] and found["digits_compare"] == []
