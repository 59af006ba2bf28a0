"""Drawn rows: a seed gives the same rows in any process, no image occurs twice, and texts neither overlap nor
are cut."""

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dataset_builders.pictures.images import ImageLimits, check_image
from tests.helpers.drawn.charts import draw_chart, make_chart
from tests.helpers.drawn.diagrams import draw_diagram, make_diagram
from tests.helpers.drawn.pages import make_page
from tests.helpers.drawn.receipts import draw_receipt, make_receipt
from tests.helpers.drawn.rows import row_streams, sentence
from tests.helpers.drawn.scenes import draw_scene, make_scene
from tests.helpers.drawn.suite import SUBSETS, iter_cord_splits, iter_suite_rows

ROOT = Path(__file__).parents[3]
FEW = dict.fromkeys(SUBSETS, 8)
DRAWERS = {
    "chart": lambda rng: draw_chart(make_chart(rng)),
    "page": lambda rng: make_page(rng)[0],
    "diagram": lambda rng: draw_diagram(make_diagram(rng)),
    "scene": lambda rng: draw_scene(make_scene(rng)),
    "receipt": lambda rng: draw_receipt(make_receipt(rng))[0],
}
DIGEST = """
import hashlib
from tests.helpers.drawn.suite import SUBSETS, iter_suite_rows
rows = list(iter_suite_rows(3, dict.fromkeys(SUBSETS, 2)))
print(hashlib.sha256(repr(rows).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def rows():
    found = {subset: [] for subset in SUBSETS}
    for subset, row in iter_suite_rows(0, FEW):
        found[subset].append(row)
    return found


def picture(row):
    return row["images"][0]["bytes"]


def test_every_set_has_its_rows_and_no_picture_twice(rows):
    assert {subset: len(found) for subset, found in rows.items()} == FEW
    pictures = [picture(row) for found in rows.values() for row in found]
    assert len(set(pictures)) == len(pictures)


def test_pictures_are_small_and_sound(rows):
    for subset, found in rows.items():
        for row in found:
            info = check_image(picture(row), ImageLimits(max_pixels=600 * 600, min_side=200))
            assert max(info.width, info.height) <= 600 and (info.mode, info.format) == ("RGB", "PNG")
            if subset == "cord_v2":
                assert info.height > info.width


def test_the_same_in_another_process():
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DIGEST], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == digest_of(list(iter_suite_rows(3, dict.fromkeys(SUBSETS, 2))))


def digest_of(rows):
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def test_another_seed_draws_other_pictures(rows):
    other = list(iter_suite_rows(1, dict.fromkeys(SUBSETS, 3)))
    assert not {picture(row) for _, row in other} & {picture(row) for found in rows.values() for row in found}


def test_the_first_rows_do_not_depend_on_how_many_there_are(rows):
    fewer = {"docvqa": 5, "cord_v2": 3}
    assert [row for _, row in iter_suite_rows(0, fewer)] == rows["docvqa"][:5] + rows["cord_v2"][:3]


def test_a_small_set_skips_a_picture_that_was_there(monkeypatch):
    from tests.helpers.drawn import suite

    pictures = itertools.cycle([b"a", b"a", b"b", b"c"])
    cycled = {"few": lambda seed, stream: ({"images": [{"bytes": next(pictures)}]} for _ in itertools.count())}
    monkeypatch.setattr(suite, "_SETS", cycled)
    assert [picture(row) for _, row in iter_suite_rows(0, {"few": 3})] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("name", DRAWERS)
def test_no_text_overlaps_another_or_leaves_the_sheet(name):
    for rng in itertools.islice(row_streams(7, 0), 60):
        canvas = DRAWERS[name](rng)
        boxes = np.array([text.box for text in canvas.texts])
        assert boxes[:, :2].min() >= 0 and boxes[:, 2].max() <= canvas.width and boxes[:, 3].max() <= canvas.height
        for a, b in itertools.combinations(canvas.texts, 2):
            (left, top, right, bottom), (l2, t2, r2, b2) = a.box, b.box
            assert right <= l2 or r2 <= left or bottom <= t2 or b2 <= top, (a, b)


def test_receipts_fall_into_cords_splits():
    splits = [split for split, _ in iter_cord_splits(0, 20)]
    assert splits == ["train"] * 16 + ["validation"] * 2 + ["test"] * 2
    pictures = {row["image"]["bytes"] for _, row in iter_cord_splits(0, 20)}
    assert len(pictures) == 20
    assert [split for split, _ in iter_cord_splits(0, 1)] == ["train"]


def test_answers_are_written_as_in_the_cauldron():
    assert [sentence(text) for text in ("oslo", "14", "12.5%", "Mr. Ito.", "INV-1")] == [
        *("Oslo.", "14.", "12.5%.", "Mr. Ito.", "INV-1."),
    ]
