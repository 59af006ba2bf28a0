"""report.json and the page made from it: complete, escaped, self-contained, and the same bytes every time."""

import json
import os
import re

import numpy as np
import pytest

from dataset_builders.contracts.manifest import Manifest
from stages.shared.pages.page import artifact_page, markdown_table, plain_page
from stages.shared.pages.report import (
    Drawing,
    Histogram,
    Picture,
    Pictures,
    Table,
    read_report,
    section_data,
    write_report,
)
from stages.shared.pages.shown_numbers import show_gain, show_share, show_value
from tests.helpers.pages import assert_images_told, assert_self_contained, parse_page
from tests.helpers.raw_rows import encode, picture, png

MANIFEST = Manifest(stage="made", version=1, fingerprint="0" * 16, config={}, parents={})
SVG = '<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(1)</script></svg>'


def write(directory, title="A title", summary=None, sections=()):
    write_report(directory, title=title, summary=summary or {}, sections=sections)
    return json.loads((directory / "report.json").read_text()), artifact_page(directory, MANIFEST)


def bars(values):
    return [(bar["count"], bar["first"], bar["last"]) for bar in section_data(Histogram("h", values, "x"))["bars"]]


def all_kinds():
    return [
        Histogram("Sides", [32, 32, 48, 64, 640], "pixels"),
        Table("Subsets", ["subset", "samples"], [["ai2d", 12345], ["vqa", None]]),
        Pictures("Samples", [Picture(png(1), "1 image of ai2d/7", "Which? <7>\nand why")]),
        Drawing("Loss", SVG, "Loss over the steps"),
    ]


def test_report_json_holds_summary_and_data(tmp_path):
    data, _ = write(tmp_path, summary={"samples": 3, "splits": {"train": 2}}, sections=all_kinds())
    assert data["title"] == "A title" and data["summary"] == {"samples": 3, "splits": {"train": 2}}
    histogram, table, pictures, drawing = data["sections"]
    assert histogram["figures"] == {"count": 5, "min": 32, "median": 48, "mean": 163.2, "p95": 524.8, "max": 640}
    assert sum(bar["count"] for bar in histogram["bars"]) == 5
    assert table["columns"] == ["subset", "samples"] and table["rows"] == [["ai2d", 12345], ["vqa", None]]
    assert [image["caption"] for image in pictures["images"]] == ["Which? <7>\nand why"]
    assert drawing["source"].startswith("data:image/svg+xml;base64,")


def test_page_is_self_contained_and_shows_everything(tmp_path):
    _, page = write(tmp_path, summary={"samples": 12345}, sections=all_kinds())
    assert_self_contained(page)
    assert not re.search(r"(src|href)=\"(?!data:image/)|@import|url\(|https?://|alert", page)
    assert "width=device-width" in page
    for wanted in ["12,345", "ai2d", 'class="bars"', "Which? &lt;7&gt;", 'class="curve"', "pixels"]:
        assert wanted in page
    assert_images_told(page)
    (bars_of,) = parse_page(page).find("div", "bars")
    assert bars_of.attributes["aria-label"].startswith("Sides: bars of the count over pixels, count 5, min 32")


def test_everything_foreign_is_escaped(tmp_path):
    bad = "<script>alert(1)</script>"
    sections = [
        Histogram(bad, [1, 2], bad),
        Table(bad, [bad], [[bad]]),
        Pictures(bad, [Picture(png(1), bad, bad)]),
        Drawing(bad, bad, bad),
    ]
    for page in (
        write(tmp_path, title=bad, summary={bad: bad, "nested": {bad: bad}}, sections=sections)[1],
        plain_page(bad, bad, {bad: bad}, sections),
    ):
        assert bad not in page and parse_page(page).text.count(bad) > 8
    assert "<script" not in plain_page(bad, "", {bad: bad}, sections)


def test_a_report_that_is_none_is_not_read(tmp_path):
    assert read_report(tmp_path / "nothing") is None
    for damaged in ('{"title": "cut', "", "[]", "[" * 100_000, '{"title": "x", "summary": {}}'):
        (tmp_path / "report.json").write_text(damaged)
        assert read_report(tmp_path) is None
    (tmp_path / "report.json").unlink()
    os.mkfifo(tmp_path / "report.json")
    assert read_report(tmp_path) is None


def test_same_content_same_bytes(tmp_path):
    pages = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, sections=all_kinds())
        pages.append([(tmp_path / name / "report.json").read_bytes(), artifact_page(tmp_path / name, MANIFEST)])
    assert pages[0] == pages[1]
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["report.json"]


def test_numbers_json_cannot_say_become_null(tmp_path):
    rows = [["nan", float("nan")], ["loss", np.float64(1.5)], ["steps", np.int32(4096)]]
    data, page = write(tmp_path, summary={"worst": float("inf")}, sections=[Table("t", ["a", "b"], rows)])
    assert data["summary"]["worst"] is None
    assert data["sections"][0]["rows"] == [["nan", None], ["loss", 1.5], ["steps", 4096]]
    assert "4,096" in page


def test_empty_sections_say_so(tmp_path):
    _, page = write(tmp_path, sections=[Histogram("h", [], "x"), Table("t", ["a"], []), Pictures("p", [])])
    assert page.count('<p class="note">none</p>') == 3


@pytest.mark.parametrize("image_format, kind", [("PNG", "png"), ("JPEG", "jpeg"), ("WEBP", "webp"), ("GIF", "gif")])
def test_pictures_keep_their_format(tmp_path, image_format, kind):
    _, page = write(tmp_path, sections=[Pictures("p", [Picture(encode(picture(1), image_format), "x", "x")])])
    assert f"data:image/{kind};base64," in page


def test_whole_numbers_in_a_small_range_get_a_bar_each():
    assert bars([0, 1, 1, 3]) == [(1, 0, 0), (2, 1, 1), (0, 2, 2), (1, 3, 3)]


@pytest.mark.parametrize(
    "values", [[5] * 3, [0.25] * 3, [0, 10**6], [-3, 3], list(range(100)), [1e-9, 2e-9], [0.1, 0.2, 1e12], [7]]
)
def test_every_value_is_in_a_bar(values, tmp_path):
    _, page = write(tmp_path, sections=[Histogram("h", values, "x")])
    counts = [count for count, _, _ in bars(values)]
    assert sum(counts) == len(values) and len(counts) <= 31 and page.count('<div title="') == len(counts)


def test_a_bar_names_the_values_it_counts():
    assert bars(range(60))[1] == (2, 2.0, 3.0)
    assert bars([0.25, 0.25]) == [(2, -0.25, 0.75)]


def test_values_that_are_not_finite_are_counted_beside(tmp_path):
    data, _ = write(tmp_path, sections=[Histogram("h", [1.5, float("nan"), float("inf")], "x")])
    figures = data["sections"][0]["figures"]
    assert figures["count"] == 1 and figures["not finite"] == 2


def test_numbers_have_four_digits():
    shown = [show_value(v) for v in (None, True, 1234567, 0.123456, 12345.678, 3.0, "x", float("nan"))]
    assert shown == ["-", "yes", "1,234,567", "0.1235", "12,345.7", "3", "x", "nan"]
    assert [show_gain(v) for v in (0.12345, -0.5, 0.0, -0.0)] == ["+0.1235", "-0.5", "0", "0"]
    assert [show_share(v) for v in (0.998712, 0.95, 1.0)] == ["99.87%", "95%", "100%"]


def test_foreign_text_does_not_break_a_table_of_markdown():
    lines = markdown_table(["answer", "times"], [["a|b\n## `c` <script>", 1234]]).splitlines()
    assert lines[1:] == ["| --- | ---: |", "| a\\|b \\#\\# \\`c\\` \\<script\\> | 1,234 |"]
