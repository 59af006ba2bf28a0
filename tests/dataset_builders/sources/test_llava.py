"""LLaVA's and ShareGPT's rows to samples, with the unusual rows of such files."""

import json

import pytest

from tests.helpers.json_rows import read_source, reasons, turns, write_file
from tests.helpers.raw_rows import png

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

ONE, TWO = png(1), png(2)


def row(*values, names=("human", "gpt"), **fields):
    """Return a row of these values, whose speakers alternate through `names`."""
    said = [{"from": names[i % len(names)], "value": value} for i, value in enumerate(values)]
    return {"id": "000000033471", **fields, "conversations": said}


def read_rows(tmp_path, rows, **options):
    write_file(tmp_path / "mix.json", json.dumps(rows).encode())
    write_file(tmp_path / "coco/1.png", ONE)
    write_file(tmp_path / "coco/2.png", TWO)
    return read_source("llava", tmp_path, ["mix"], **options)


def test_a_row_of_llava(tmp_path):
    raw = row("<image>\nWhat are the colors of the bus?", "White and red.", "Where?", "There.\n", image="coco/1.png")
    (sample,) = read_rows(tmp_path, [raw])
    assert sample.key == "mix/00000000" and sample.images == (ONE,)
    assert turns(sample) == [
        ("user", "<image>\nWhat are the colors of the bus?"),
        ("assistant", "White and red."),
        ("user", "Where?"),
        ("assistant", "There."),
    ]


def test_rows_without_image_and_without_marks(tmp_path):
    rows = [
        row("2 + 2?", "4"),
        row("2 + 3?", "5", image=None, images=None),
        row("What is this?\n", "a bus", image="coco/1.png"),
    ]
    text, null, unmarked = read_rows(tmp_path, rows)
    assert text.images == null.images == ()
    assert turns(unmarked)[0] == ("user", "<image>What is this?") and unmarked.images == (ONE,)


@pytest.mark.parametrize("names", [("human", "gpt"), ("user", "assistant"), ("human", "chatgpt"), ("user", "model")])
def test_roles_by_their_other_names(names, tmp_path):
    (sample,) = read_rows(tmp_path, [row("a?", "b", names=names)])
    assert turns(sample) == [("user", "a?"), ("assistant", "b")]


def test_a_system_turn_comes_first(tmp_path):
    (sample,) = read_rows(tmp_path, [row("Be short.", "a?", "b", names=("system", "human", "gpt"))])
    assert [role for role, _ in turns(sample)] == ["system", "user", "assistant"]


def test_a_row_whose_list_of_tools_is_empty_is_read(tmp_path):
    assert reasons(read_rows(tmp_path, [row("a?", "b", tools=tools) for tools in ("", "[]", [], None)])) == [None] * 4


BAD_ROWS = {
    "mark without image": (row("<image>\na?", "b"), "image_count_mismatch"),
    "two answers": (row("a?", "b", "c", names=("human", "gpt", "gpt")), "bad_role"),
    "observation": (row("a?", "b", names=("human", "observation")), "bad_role"),
    "no role": ({"conversations": [{"value": "a?"}]}, "schema_error"),
    "value null": (row("a?", None), "schema_error"),
    "no conversations": ({"id": "1", "image": "coco/1.png"}, "schema_error"),
    "messages too": (row("a?", "b", messages=[{"role": "user"}]), "schema_error"),
    "image missing": (row("<image>a?", "b", image="coco/3.png"), "image_not_found"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_named_and_its_neighbours_stay(name, tmp_path):
    bad, reason = BAD_ROWS[name]
    items = read_rows(tmp_path, [row("1?", "1"), bad, row("2?", "2")])
    assert reasons(items) == [None, reason, None]
    assert items[1].key == "mix/00000001"
