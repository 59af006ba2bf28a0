"""convert.max_rows: which rows are taken, that no other part is opened, and how the reports show it."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from dataset_builders.contracts.strict import EVERY_FIELD
from dataset_builders.readers.parts import Part
from stages.convert import rows as raw_rows
from stages.convert import scan
from stages.convert.config import ConvertConfig
from stages.convert.rows import choose_rows
from stages.convert.scan import get_builder
from tests.helpers.raw_rows import plain_rows, row, write_source
from tests.stages.convert.test_convert import CONFIG, all_samples, convert, quarantine


def parts_of(*sizes, subset="a"):
    """Return parts of a subset with the given numbers of rows."""
    starts = np.cumsum([0, *sizes]).tolist()
    common = {"path": Path("x"), "name": "x", "span": (0, 0), "file_row": 0}
    return [Part(**common, subset=subset, first_row=start, num_rows=size) for start, size in zip(starts, sizes)]


def chosen(parts, max_rows):
    found = choose_rows(parts, max_rows)
    assert len(found) == len(parts)
    for part, rows in zip(parts, found):
        assert (np.diff(rows) > 0).all() and all(part.first_row <= r < part.first_row + part.num_rows for r in rows)
    return [part.key(row) for part, rows in zip(parts, found) for row in rows.tolist()]


def test_the_rows_are_the_same_for_ever():
    rows = [int(key[2:]) for key in chosen([*parts_of(100), *parts_of(100, subset="b")], 12)]
    assert rows == [3, 15, 35, 57, 93, 13, 35, 37, 47, 61, 78, 81]


def test_the_number_is_exact_and_a_smaller_one_is_a_subset():
    parts = [*parts_of(*[7] * 100, 0, 300), *parts_of(1, subset="b")]
    before = set()
    for max_rows in (1, 2, 10, 500, 1000, 1001, 5000):
        keys = chosen(parts, max_rows)
        assert len(keys) == len(set(keys)) == min(max_rows, 1001) and before <= set(keys)
        before = set(keys)


def test_the_cut_into_parts_changes_nothing(monkeypatch):
    whole = chosen(parts_of(1000), 100)
    assert chosen(parts_of(*[10] * 100), 100) == whole
    for size in (1, 64, 1000):
        monkeypatch.setattr(raw_rows, "_CHUNK", size)
        assert chosen(parts_of(*[10] * 100), 100) == whole


def test_equal_draws_are_cut_at_the_exact_number(monkeypatch):
    monkeypatch.setattr(raw_rows, "_hash", lambda rows, seeds: rows % np.uint64(3))
    assert [key[-1] for key in chosen(parts_of(4, 6), 6)] == ["0", "1", "3", "4", "6", "9"]


def test_too_few_rows_under_the_first_bound_are_made_up_for(monkeypatch):
    monkeypatch.setattr(raw_rows, "_hash", lambda rows, seeds: np.uint64(2**63) + rows)
    assert [key[-1] for key in chosen(parts_of(5000, 5000), 3)] == ["0", "1", "2"]


def test_rows_are_spread_over_the_source():
    rows = np.array([int(key[2:]) for key in chosen(parts_of(*[1000] * 100), 10_000)])
    counts = np.bincount(rows // 1000, minlength=100)
    assert abs(counts - 100).max() < 50


def test_only_the_chosen_rows_are_read_and_the_reports_say_so(tmp_path, monkeypatch):
    opened = []
    builder = get_builder("the_cauldron")

    def iter_part(part, options, rows):
        opened.append((part.first_row, rows))
        return builder.iter_part(part, options, rows)

    monkeypatch.setattr(scan, "get_builder", lambda name: dataclasses.replace(builder, iter_part=iter_part))
    rows = [*plain_rows(48), row([], [("What?", "")]), row([], [("What?", " ")])]
    source = write_source(tmp_path / "raw", {"s": rows}, file_rows=5)
    expected = chosen(parts_of(*[5] * 10, subset="s"), 9)
    artifact = convert(tmp_path / "root", source, max_rows=9, max_skip_fraction=1)
    assert sorted([*(s.key for s in all_samples(artifact)), *(q["key"] for q in quarantine(artifact.dir))]) == expected
    numbers = [int(key[2:]) for key in expected]
    assert [(first, sorted(taken)) for first, taken in opened] == [
        (first, of_part) for first in range(0, 50, 5) if (of_part := [n for n in numbers if n // 5 == first // 5])
    ]
    assert len(opened) < 10
    stats, report = artifact.manifest.stats, json.loads((artifact.dir / "report.json").read_text())
    assert (stats["source_rows"], stats["raw_rows"], stats["seen"]) == (50, 9, 9)
    assert (report["summary"]["rows of the source"], report["summary"]["raw rows"]) == (50, 9)


def test_a_source_with_fewer_rows_is_read_whole(tmp_path):
    source = write_source(tmp_path / "raw", {"s": plain_rows(6)})
    limited, whole = convert(tmp_path, source, max_rows=6), convert(tmp_path, source)
    assert limited.manifest.shards == whole.manifest.shards and limited.dir != whole.dir
    assert limited.manifest.stats == whole.manifest.stats and "source_rows" not in whole.manifest.stats


def test_null_is_no_part_of_the_identity():
    assert "max_rows" not in ConvertConfig(**CONFIG).model_dump(mode="json")
    assert ConvertConfig(**CONFIG).model_dump(context=EVERY_FIELD)["max_rows"] is None
    assert ConvertConfig(**CONFIG, max_rows=5).model_dump(mode="json")["max_rows"] == 5
