"""report.json and report.html: complete, escaped, self-contained, and the same bytes every time."""

import json
import os
import re

import numpy as np
import pytest

from stages.pages.histogram import bars, histogram_data
from stages.pages.page import render, show_value
from stages.pages.report import Histogram, Pictures, Table, Text, read_report, write_report
from tests.helpers.raw_rows import encode, picture, png


def write(directory, title="A title", summary=None, sections=()):
    write_report(directory, title=title, summary=summary or {}, sections=sections)
    return json.loads((directory / "report.json").read_text()), (directory / "report.html").read_text()


def all_kinds():
    return [
        Histogram("Sides", [32, 32, 48, 64, 640], "pixels"),
        Table("Subsets", ["subset", "samples"], [["ai2d", 12345], ["vqa", None]]),
        Pictures("Samples", [(png(1), "Which? <7>\nand why")]),
        Text("Tokens", "<pre>a <b>b</b></pre>"),
    ]


def test_report_json_holds_summary_and_data(tmp_path):
    data, _ = write(tmp_path, summary={"samples": 3, "splits": {"train": 2}}, sections=all_kinds())
    assert data["title"] == "A title" and data["summary"] == {"samples": 3, "splits": {"train": 2}}
    histogram, table, pictures, text = data["sections"]
    assert histogram["count"] == 5 and sum(histogram["counts"]) == 5 and histogram["max"] == 640
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1
    assert table["columns"] == ["subset", "samples"] and table["rows"] == [["ai2d", 12345], ["vqa", None]]
    assert pictures["captions"] == ["Which? <7>\nand why"] and text["html"] == "<pre>a <b>b</b></pre>"


def test_page_is_self_contained_and_shows_everything(tmp_path):
    _, page = write(tmp_path, summary={"samples": 12345}, sections=all_kinds())
    assert not re.search(r"(src|href)=\"(?!data:image/png;base64,)|@import|url\(|https?://", page)
    assert "width=device-width" in page
    for wanted in ["12,345", "ai2d", 'class="bars"', "Which? &lt;7&gt;", "<pre>a <b>b</b></pre>", "pixels"]:
        assert wanted in page


def test_everything_foreign_is_escaped(tmp_path):
    bad = "<script>alert(1)</script>"
    sections = [
        Histogram(bad, [1, 2], bad),
        Table(bad, [bad], [[bad]]),
        Pictures(bad, [(png(1), bad)]),
        Text(bad, "fine"),
    ]
    _, page = write(tmp_path, title=bad, summary={bad: bad, "nested": {bad: bad}}, sections=sections)
    assert "<script" not in page


def test_a_page_is_rendered_again_from_its_json(tmp_path):
    _, page = write(tmp_path, summary={"samples": 3, "images": 1}, sections=all_kinds())
    assert render("page.html.j2", **read_report(tmp_path)) == page
    (tmp_path / "report.json").write_text('{"title": "of an older format", "summary": {}, "sections": []}')
    assert read_report(tmp_path) is None and read_report(tmp_path / "nothing") is None
    for damaged in ('{"title": "cut', "", "[]", "[" * 100_000):
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
        pages.append([(tmp_path / name / f"report.{kind}").read_bytes() for kind in ("html", "json")])
    assert pages[0] == pages[1]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["report.html", "report.json"]


def test_numbers_json_cannot_say_become_null(tmp_path):
    rows = [["nan", float("nan")], ["loss", np.float64(1.5)], ["steps", np.int32(4096)]]
    data, page = write(tmp_path, summary={"worst": float("inf")}, sections=[Table("t", ["a", "b"], rows)])
    assert data["summary"]["worst"] is None and data["sections"][0]["rows"] == [
        ["nan", None],
        ["loss", 1.5],
        ["steps", 4096],
    ]
    assert "nan" in page and "inf" in page and "4,096" in page


def test_a_row_of_another_length_is_our_mistake(tmp_path):
    with pytest.raises(AssertionError, match="another length"):
        write(tmp_path, sections=[Table("t", ["a", "b"], [["only one"]])])


def test_empty_sections_say_so(tmp_path):
    _, page = write(tmp_path, sections=[Histogram("h", [], "x"), Table("t", ["a"], []), Pictures("p", [])])
    assert "no values" in page and "none" in page


@pytest.mark.parametrize("image_format, kind", [("PNG", "png"), ("JPEG", "jpeg"), ("WEBP", "webp"), ("GIF", "gif")])
def test_pictures_keep_their_format(tmp_path, image_format, kind):
    _, page = write(tmp_path, sections=[Pictures("p", [(encode(picture(1), image_format), "x")])])
    assert f"data:image/{kind};base64," in page


def test_whole_numbers_in_a_small_range_get_a_bar_each():
    data = histogram_data(Histogram("h", [0, 1, 1, 3], "x"))
    assert data["counts"] == [1, 2, 0, 1] and data["edges"] == [-0.5, 0.5, 1.5, 2.5, 3.5]


@pytest.mark.parametrize(
    "values", [[5] * 3, [0.25] * 3, [0, 10**6], [-3, 3], list(range(100)), [1e-9, 2e-9], [0.1, 0.2, 1e12], [7]]
)
def test_every_value_is_in_a_bar(values, tmp_path):
    data, page = write(tmp_path, sections=[Histogram("h", values, "x")])
    assert sum(data["sections"][0]["counts"]) == len(values)
    assert len(data["sections"][0]["counts"]) <= 31 and page.count('<div title="') == len(data["sections"][0]["counts"])


def test_a_bar_names_the_values_it_counts():
    whole = histogram_data(Histogram("h", range(60), "x"))
    assert list(bars(whole))[1] == {"count": 2, "first": 2.0, "last": 3.0}
    (alone,) = bars(histogram_data(Histogram("h", [0.25, 0.25], "x")))
    assert alone == {"count": 2, "first": -0.25, "last": 0.75}


def test_values_that_are_not_finite_are_counted_beside(tmp_path):
    data, _ = write(tmp_path, sections=[Histogram("h", [1.5, float("nan"), float("inf")], "x")])
    assert data["sections"][0]["count"] == 1 and data["sections"][0]["not_finite"] == 2


def test_show_value():
    shown = [show_value(v) for v in (None, True, 1234567, 0.123456, 12345.678, 3.0, "x", float("nan"))]
    assert shown == ["-", "yes", "1,234,567", "0.1235", "12,345.7", "3", "x", "nan"]
