"""Tables in every kind of file give the same samples; unusual rows and files of CSV, TSV and JSON."""

import csv
import gzip
import json
from functools import partial

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from s3fs.core import S3File

from dataset_builders.errors import InputError
from dataset_builders.readers import table_files, text_files
from dataset_builders.sources.table import TableOptions, iter_part, list_parts
from dataset_builders.storage.store import location
from tests.helpers.json_rows import data_uri, read_source, reasons, turns, write_file
from tests.helpers.json_rows import json_lines as as_lines
from tests.helpers.object_store import BUCKET, moto_server
from tests.helpers.raw_rows import png
from tests.helpers.tiers import full

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

ONE = png(1)
MAP = {"image": "image", "question": "question", "answer": "answer"}
HEADER = "image,question,answer\n"
GOOD = "1.png,What?,this\n"


@pytest.fixture
def source(tmp_path):
    write_file(tmp_path / "1.png", ONE)
    return tmp_path


def read(source, **options):
    return read_source("table", source, **MAP | options)


def read_csv(source, text, name="t.csv", **options):
    """Return samples and skipped rows of a file with this text."""
    write_file(source / name, text if isinstance(text, bytes) else text.encode())
    return read(source / name, **options)


def write_arrow(open_writer):
    def write(table, path):
        with pa.OSFile(path, "wb") as out, open_writer(out, table.schema) as writer:
            writer.write_table(table, 3)

    return write


WRITE_TABLE = {
    ".parquet": partial(pq.write_table, row_group_size=3),
    ".feather": partial(feather.write_feather, compression="zstd", chunksize=3),
    ".arrow": write_arrow(pa.ipc.new_stream),
    "file.arrow": write_arrow(pa.ipc.new_file),
}


def write_rows(path, rows):
    """Write the rows, one dict each, as a file of the kind that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table = WRITE_TABLE.get(path.name) or WRITE_TABLE.get(path.suffix)
    if write_table is not None:
        write_table(pa.Table.from_pylist(rows), str(path))
    elif path.suffix in (".csv", ".tsv"):
        delimiter = "\t" if path.suffix == ".tsv" else ";" if "semicolon" in path.name else ","
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_bytes(as_lines(rows) if path.suffix == ".jsonl" else json.dumps(rows).encode())
    return path


@pytest.fixture
def small_parts(monkeypatch):
    for module in (text_files, table_files):
        monkeypatch.setattr(module, "_PART_ROWS", 3)


ROWS = [{"image": "1.png", "question": f'{i}, "two";\n\u00e9\tthree', "answer": str(i), "more": ""} for i in range(10)]
KINDS = ("a.parquet", "a.arrow", "file.arrow", "a.feather", "a.csv", "a_semicolon.csv", "a.tsv", "a.jsonl", "a.json")


@pytest.mark.parametrize("name", KINDS)
def test_parts_of_every_kind_of_file_give_the_same_rows_side_by_side(name, source, small_parts):
    path, options = write_rows(source / name, ROWS), TableOptions(**MAP)
    parts = list_parts(path, (), options)
    assert [(part.first_row, part.num_rows) for part in parts] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    backwards = [list(iter_part(part, options)) for part in reversed(parts)]
    found = [item for items in reversed(backwards) for item in items]
    assert [turns(item) for item in found] == [
        [("user", f"<image>{row['question']}"), ("assistant", row["answer"])] for row in ROWS
    ]
    assert [int(item.key[-8:]) for item in found] == list(range(10))
    assert [item.key[-1] for item in read_source("table", path, rows={2, 7}, **MAP)] == ["2", "7"]


def test_files_of_different_kinds_in_a_subset_are_numbered_on(source, small_parts):
    for i, suffix in enumerate(("jsonl", "parquet", "tsv", "json", "csv")):
        write_rows(source / "mix" / f"{i}.{suffix}", [{**row, "answer": f"{i}"} for row in ROWS[:4]])
    write_file(source / "other/state.json", b'{"written": "by the library datasets"}')
    write_rows(source / "other" / "dataset-0.csv", ROWS[:1])
    found = read(source, image_root=".")
    assert [item.key for item in found] == [*(f"mix/{i:08d}" for i in range(20)), "other/00000000"]
    assert [turns(item)[1][1] for item in found] == [str(i) for i in range(5) for _ in range(4)] + ["0"]
    assert [item.key for item in read_source("table", source, ["other"], **MAP, image_root=".")] == ["other/00000000"]


FORMS = {
    "byte order mark before a quote": b'\xef\xbb\xbf"image",question,answer\n1.png,What?,this\n',
    "CRLF": (HEADER + GOOD).replace("\n", "\r\n").encode(),
    "CR": (HEADER + GOOD).replace("\n", "\r").encode(),
    "blank lines": ("\n \n" + HEADER + "\r\n" + "  \t\n" + GOOD + "\n\n").encode(),
    "white space before cells": b'image, question, answer\n1.png, "What?", this\n',
    "more columns than are read": b"a,image,question,,answer,a\n0,1.png,What?,,this,\n",
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_csv_files(name, source):
    (item,) = read_csv(source, FORMS[name])
    assert item.images == (ONE,) and turns(item) == [("user", "<image>What?"), ("assistant", "this")]


def test_the_delimiter_is_that_of_the_header(source):
    assert turns(read_csv(source, "image\tquestion\tanswer\n1.png\ta;b;c;d,e\tf\n")[0])[1] == ("assistant", "f")
    assert turns(read_csv(source, "image;question;answer,\n1.png;a;f\n", answer="answer,")[0])[1] == ("assistant", "f")
    assert turns(read_csv(source, "answer\nlike,this\nthat\n", image=None, question="{answer}?")[1])[1][1] == "that"


# the middle row of three -> (its reason, text in its detail)
BAD_ROWS = {
    "1.png,What?": ("schema_error", "the row has 2 cells, the header 3"),
    '1.png,"What?\n1.png,What?,this\n1.png,"What"?,this': ("schema_error", "3 lines, so a quote may be missing"),
    '1.png,"What?\n1.png,What?,this\n1.png,What",a,b,c': ("schema_error", "5 cells, the header 3; it has 3 lines"),
    '1.png,"What"?,this': ("schema_error", "the row is malformed: ',' expected after '\"'"),
    b"1.png,What?,\xe9t\xe9": ("schema_error", "answer: not UTF-8"),
    ",What?,this": ("schema_error", "image is null"),
    "2.png,What?,this": ("image_not_found", "'2.png'"),
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_bad_row_is_named_and_its_neighbours_stay(row, source):
    line = row if isinstance(row, bytes) else row.encode()
    found = read_csv(source, HEADER.encode() + GOOD.encode() + line + b"\n" + GOOD.encode())
    reason, detail = BAD_ROWS[row]
    assert reasons(found) == [None, reason, None] and detail in found[1].detail
    assert [item.key for item in found] == [f"t/{i:08d}" for i in range(3)]


def test_the_line_of_excel_that_names_the_delimiter(source):
    text = "\ufeffsep=;\r\nimage;question;answer\r\n1.png;What?;a, b, c\r\n"
    assert [turns(item)[1][1] for item in read_csv(source, text)] == ["a, b, c"]
    assert [turns(item)[1][1] for item in read_csv(source, "sep=|\nimage|question|answer\n1.png|?|a\n")] == ["a"]


def test_empty_cells_of_images_and_references_are_null(source):
    text = "image,question,answer,all\n ,What?,this,\n1.png,What?,this,that\n1.png,,this,\n"
    found = read_csv(source, text, null_image="absent", references="all")
    assert [item.images for item in found] == [(), (ONE,), (ONE,)]
    assert [item.messages[1].references for item in found] == [(), ("that",), ()]
    assert turns(found[2])[0] == ("user", "<image>")


WRONG = {
    "UTF-16": ((HEADER + GOOD).encode("utf-16"), r"t\.csv is UTF-16; convert it to UTF-8"),
    "gzip": (gzip.compress((HEADER + GOOD).encode()), r"t\.csv is compressed by gzip; unpack it"),
    "empty": (b"", r"t\.csv has no header line"),
    "no such column": (b"image,questions,answer\n", r"has no column 'question'.*answer; did you mean 'questions'"),
    "a name of two lines": (
        b'"ima\nge",question,answer\n',
        r"has no column 'image'.*: 'ima\\nge', question, answer; did",
    ),
    "a column twice": (b"image,question,answer, answer\n", "has the column 'answer' 2 times"),
    "header not UTF-8": (b"image,question,answer,r\xe9f\n", r"not UTF-8; .*iconv -f WINDOWS-1252 -t UTF-8"),
    "open quote": (
        (HEADER + GOOD + '1.png,"What?,this\n' + GOOD).encode(),
        f"the row at byte {len(HEADER + GOOD)} is not finished at the end of the file",
    ),
    "open quote in the header": (b'image,"question,answer\n', "the row at byte 0 is not finished"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_cannot_be_read_ends_in_one_line(name, source):
    content, message = WRONG[name]
    with pytest.raises(InputError, match=message) as caught:
        read_csv(source, content)
    assert "\n" not in str(caught.value) and str(source / "t.csv") in str(caught.value)


def test_a_quote_that_is_open_for_too_long_is_refused_before_it_fills_memory(source, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_ROW_BYTES", 100)
    assert reasons(read_csv(source, HEADER + GOOD + '1.png,"' + "a " * 40 + '\n",this\n')) == [None, None]
    for row in ('1.png,"' + "a b\n" * 25 + '",this\n', "1.png," + "a" * 100 + ",this\n"):
        with pytest.raises(InputError, match=r"the row at byte 39 is not finished at 100 bytes on"):
            read_csv(source, HEADER + GOOD + row + GOOD)


def test_an_image_in_a_cell_may_be_long(source):
    image = png(2, 400, 400) + b"\0" * 200_000
    assert read_csv(source, f'{HEADER}"{data_uri(image)}",What?,this\n')[0].images == (image,)


def test_a_file_that_changes_after_it_was_cut_is_refused(source):
    path = write_file(source / "t.csv", (HEADER + GOOD * 3).encode())
    (part,) = list_parts(path, (), TableOptions(**MAP))
    path.write_text(HEADER + GOOD * 2)
    with pytest.raises(InputError, match="became shorter while it was read, before row 2"):
        list(iter_part(part, TableOptions(**MAP)))


BAD_JSON = {
    '{"image": "1.png", "question": "What?", "answers": "a"}': ("schema_error", "did you mean 'answers'"),
    '{"image": null, "question": "What?", "answer": "a"}': ("schema_error", "image is null"),
    '{"image": ["1.png", 7], "question": "What?", "answer": "a"}': ("schema_error", "image 1 is 7, neither bytes"),
    '{"image": "1.png", "question": ["What?"], "answer": "a"}': ("schema_error", "question holds an array"),
    '{"image": "1.png", "question": "What?", "answer": {"a": 1}}': ("schema_error", "answer holds an object"),
    '{"image": "1.png", "question": "What?", "answer": NaN}': ("schema_error", "answer is nan"),
    '["1.png", "What?", "a"]': ("schema_error", "the row is an array, not an object"),
    '{"image": "1.png", "question": "What?", "answer": "a", "answer": "b"}': (
        "json_parse_error",
        "the key 'answer' twice",
    ),
}


@pytest.mark.parametrize("row", BAD_JSON)
def test_a_bad_json_row_is_named_and_its_neighbours_stay(row, source):
    good = {"image": ["1.png"], "question": 1, "answer": ["yes", True, 1.5]}
    write_file(source / "t.jsonl", as_lines([good, row.encode(), {**good, "image": {"path": "1.png"}}]))
    found = read(source, answers="join")
    reason, detail = BAD_JSON[row]
    assert reasons(found) == [None, reason, None] and detail in found[1].detail
    assert turns(found[0]) == turns(found[2]) == [("user", "<image>1"), ("assistant", "yes, true, 1.5")]


def test_a_row_of_a_json_array_that_holds_a_key_twice_is_left_out(source):
    good = '{"image": "1.png", "question": "What?", "answer": "a"}'
    twice = '{"image": "1.png", "question": "What?", "answer": "a", "x": {"y": 1, "z": [{"k": 1, "k": 2}]}}'
    write_file(source / "t.json", f"[{good}, {twice}, {good}]".encode())
    found = read(source)
    assert reasons(found) == [None, "json_parse_error", None] and "the key 'k' twice" in found[1].detail


SPLITS = ["train", "test", "train", "validation", ""]


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.jsonl", "t.json"])
def test_a_split_column_divides_every_part(name, source, small_parts):
    """A row without a split stays with the row before it, and is left out."""
    null = "" if name == "t.csv" else None
    write_rows(source / name, [{**row, "part": split or null} for row, split in zip(ROWS, SPLITS)])
    options = TableOptions(**MAP, split="part")
    parts = list_parts(source, (), options)
    assert [(p.split, p.first_row, p.file_row, p.num_rows) for p in parts] == [
        ("train", 0, 0, 1),
        ("heldout", 1, 1, 1),
        ("train", 2, 2, 1),
        ("heldout", 3, 3, 2),
    ]
    found = [item for part in parts for item in iter_part(part, options)]
    assert [item.key for item in found] == [f"t/{i:08d}" for i in range(5)]
    assert reasons(found) == [None] * 4 + ["schema_error"]
    assert [turns(item)[1][1] for item in found[:4]] == list("0123")
    assert [item.key[-1] for item in read_source("table", source, rows={1, 4}, **MAP, split="part")] == ["1", "4"]


def test_an_unknown_split_is_named_with_its_row(source):
    write_rows(source / "t.csv", [{**ROWS[0], "part": split} for split in ("train", "", "dev")])
    with pytest.raises(InputError, match=r"t\.csv, row 2: column 'part' holds 'dev', which is neither"):
        read(source, split="part")


@pytest.mark.parametrize("name", [full("t.csv"), "t.jsonl", full("t.json")])
def test_a_part_of_a_stored_file_takes_little_more_than_its_bytes(name, tmp_path, monkeypatch):
    fetched, fetch = [], S3File._fetch_range

    def count(file, start, end):
        fetched.append(end - start)
        return fetch(file, start, end)

    path = write_rows(tmp_path / name, [{"question": f"{i}?", "answer": "a" * 300} for i in range(12_000)])
    options = TableOptions(image=None, question="question", answer="answer")
    with moto_server():
        stored = location(f"s3://{BUCKET}/raw/{name}")
        stored.write_bytes(path.read_bytes())
        part, stored_size = list_parts(stored, (), options)[3], path.stat().st_size
        monkeypatch.setattr(S3File, "_fetch_range", count)
        assert len(list(iter_part(part, options))) == part.num_rows == 512
    assert 100_000 < part.span[1] - part.span[0] < sum(fetched) < 2 << 20 < stored_size


UNREAD = {
    "image later": {"image": "1.png"},
    "image of another name": {"img_path": "1.png"},
    "label false": {"label": False},
    "not to train": {"is_training": 0},
    "masked": {"mask": True},
    "weights of messages": {"weights": [0, 1]},
    "objects": {"objects": {"bbox": [[1, 2, 3, 4]]}},
    "video": {"video": "1.mp4"},
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", UNREAD)
def test_a_later_row_with_a_key_that_would_change_the_training_is_left_out(name, suffix, source):
    """The first rows decide how a source is read, and have no such key."""
    rows = [{"question": f"{i}?", "answer": "b", "id": i, "edited": True} for i in range(12)]
    rows[10] |= UNREAD[name]
    if suffix == "parquet":
        rows = [{**dict.fromkeys(UNREAD[name]), **row} for row in rows]
    write_rows(source / f"t.{suffix}", rows)
    items = read(source / f"t.{suffix}", image=None)
    assert reasons(items) == [None] * 10 + ["schema_error", None] and repr(next(iter(UNREAD[name]))) in items[10].detail


def test_keys_beside_a_row_s_image_do_no_harm(source):
    row = {"question": "a?", "answer": "b", "image": "1.png", "image_url": "https://example.com/1.png", "label": "cat"}
    row |= {"image_id": 7, "weight": 0.5, "score": 0, "correct": True, "file_name": "1.png", "objects": []}
    write_rows(source / "t.jsonl", [row])
    assert reasons(read(source)) == [None]


def test_a_think_block_in_an_answer_is_its_reasoning_and_numbered_marks_are_places(source):
    rows = [
        {"image": "1.png", "question": "a?", "answer": "<think>\nSo.\n</think>\n\nb"},
        {"image": ["1.png", data_uri(png(2))], "question": "Is <image 2> like <image 1>?", "answer": "b"},
        {"image": "1.png", "question": "Is <image 2> there?", "answer": "b"},
        {"image": "1.png", "question": "Where?", "answer": "<bbox>"},
    ]
    write_rows(source / "t.jsonl", rows)
    thought, numbered, *refused = read(source)
    assert (thought.messages[1].reasoning, thought.messages[1].text) == ("So.", "b")
    assert numbered.images == (png(2), ONE) and turns(numbered)[0] == ("user", "Is <image> like <image>?")
    assert reasons(refused) == ["special_token_in_text"] * 2


@pytest.mark.parametrize(
    "cell", ["['red', 'RED']", '["red", "RED"]', "{'en': 'red'}", "[1, 2]", "[red] or ['RED'] there", "I'm [here]"]
)
def test_a_list_that_is_written_as_text_in_a_csv_file_is_left_out(cell, source):
    (source / "t.csv").write_text(f'image,question,answer\n1.png,What?,"{cell.replace(chr(34), chr(34) * 2)}"\n')
    (item,) = read(source / "t.csv")
    if cell[:2] in ("['", '["', "{'"):
        assert item.reason == "schema_error" and "is a list written as text" in item.detail
    else:
        assert turns(item)[1][1] == cell


def test_a_choice_that_a_row_does_not_have_is_no_line_of_its_question(source):
    text = "image,question,A,B,C,answer\n1.png,Which?,red,blue,,B\n1.png,Which?,red,blue,green,C\n"
    two, three = read_csv(source, text, question="{question}\nA. {A}\nB. {B}\nC. {C}")
    assert turns(two)[0][1] == "<image>Which?\nA. red\nB. blue"
    assert turns(three)[0][1] == "<image>Which?\nA. red\nB. blue\nC. green"
