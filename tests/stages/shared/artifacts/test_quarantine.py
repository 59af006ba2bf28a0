"""One writer for the quarantine of every stage."""

import json

from stages.shared.artifacts.left_out import QUARANTINE, LeftOut, count_reasons, left_out_table, write_left_out


def test_place_is_written_where_there_is_one_and_the_lines_are_counted(tmp_path):
    items = [LeftOut("a/00000001", "bomb", "big", "a/x.parquet", 0), LeftOut("a/00000002", "over_length", "long")]
    assert write_left_out(tmp_path, iter(items)) == 2
    lines = [json.loads(line) for line in (tmp_path / QUARANTINE).read_text().splitlines()]
    assert lines[0] == {"key": "a/00000001", "reason": "bomb", "detail": "big", "file": "a/x.parquet", "row": 0}
    assert lines[1] == {"key": "a/00000002", "reason": "over_length", "detail": "long"}
    assert write_left_out(tmp_path, []) == 0 and (tmp_path / QUARANTINE).read_text() == ""
    assert count_reasons(items) == {"bomb": 1, "over_length": 1}


def test_hostile_text_is_a_line_of_valid_json(tmp_path):
    detail = "half \ud800 and\nline \u2028 \u4f60"
    write_left_out(tmp_path, [LeftOut("a/00000001", "schema_error", detail)])
    (line,) = (tmp_path / QUARANTINE).read_bytes().removesuffix(b"\n").split(b"\n")
    assert json.loads(line.decode("utf-8"))["detail"] == detail


def test_table_says_how_many_there_are():
    items = [LeftOut(f"a/{i:08d}", "bomb", "big", "f", i) for i in range(300)]
    table = left_out_table(items)
    assert list(table.columns) == ["key", "reason", "detail", "file", "row"] and len(table.rows) == 200
    assert "200 of 300" in table.title and left_out_table(items[:3]).title == "Left out"
    assert "3 of 5000" in left_out_table(items[:3], 5000).title and left_out_table([]).rows == []
