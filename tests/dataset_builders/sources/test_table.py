"""Any table by a column map: kinds of columns and files, templates, splits by a column, unusual rows with their
reasons."""

import datetime
import json
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import ImageLimits
from dataset_builders.readers.parts import SkippedRow
from dataset_builders.recognise.recognise import recognise
from dataset_builders.sources.table import TableOptions, iter_part, list_parts
from dataset_builders.storage.store import location
from tests.helpers.json_rows import read_source, reasons, turns
from tests.helpers.object_store import BUCKET, moto_server
from tests.helpers.raw_rows import encode, picture, png

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

ONE, TWO = png(1), encode(picture(2), "JPEG")
MAP = {"image": "picture", "question": "ask", "answer": "say"}


def write(path, columns, **options):
    """Write a parquet file of these columns: name -> values, or an arrow array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


def read(source, **options):
    return read_source("table", source, **MAP | options)


def columns(picture, ask="What?", say="this"):
    return {"picture": picture, "ask": [ask] * len(picture), "say": [say] * len(picture)}


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
IMAGE_KINDS = {
    "binary": pa.array([ONE, TWO], pa.binary()),
    "large binary": pa.array([ONE, TWO], pa.large_binary()),
    "struct": pa.array([{"bytes": ONE, "path": "x.png"}, {"bytes": None, "path": "two.jpg"}], STRUCT),
    "struct of bytes": pa.array([{"bytes": ONE}, {"bytes": TWO}], pa.struct([("bytes", pa.binary())])),
    "list of bytes": pa.array([[ONE], [TWO]], pa.list_(pa.binary())),
    "list of structs": pa.array(
        [[{"bytes": ONE, "path": None}], [{"bytes": None, "path": "two.jpg"}]], pa.list_(STRUCT)
    ),
    "path": pa.array(["deep/one.png", "two.jpg"]),
    "paths": pa.array([["deep/one.png"], ["two.jpg"]]),
    "path in a dictionary": pa.array(["deep/one.png", "two.jpg"]).dictionary_encode(),
}


@pytest.mark.parametrize("name", IMAGE_KINDS)
def test_image_columns_of_every_kind(name, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.png").write_bytes(ONE)
    (tmp_path / "two.jpg").write_bytes(TWO)
    write(tmp_path / "qa.parquet", columns(IMAGE_KINDS[name]))
    first, second = read(tmp_path)
    assert (first.images, second.images) == ((ONE,), (TWO,)) and first.key == "qa/00000000"
    assert turns(first) == [("user", "<image>What?"), ("assistant", "this")]


def stream(table):
    """Return an Arrow stream in batches of two rows."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, 2)
    return out.getvalue().to_pybytes()


def test_a_template_several_images_and_a_system_text(tmp_path):
    data = {
        "left": [ONE, ONE],
        "right": [TWO, TWO],
        "n": [3, 4],
        "what": ["cats ", "dogs\r\n"],
        "say": [True, False],
        "rules": ["Be brief.", "Be brief."],
    }
    write(tmp_path / "a" / "0.parquet", data)
    options = {"image": ["left", "right"], "question": "<image> and <image>: {n} {what}?", "system": "{rules} Now."}
    first, second = read(tmp_path, **options)
    assert first.images == (ONE, TWO) and first.key == "a/00000000"
    assert turns(first) == [
        ("system", "Be brief. Now."),
        ("user", "<image> and <image>: 3 cats?"),
        ("assistant", "true"),
    ]
    assert turns(second)[1:] == [("user", "<image> and <image>: 4 dogs?"), ("assistant", "false")]
    (fixed, _) = read(tmp_path, image="left", question="<image>What is this?")
    assert turns(fixed)[0] == ("user", "<image>What is this?")


ANSWERS = {
    "text": (pa.array([" a\r\nb "]), "a\nb"),
    "number": (pa.array([7]), "7"),
    "float": (pa.array([0.5]), "0.5"),
    "float32": (pa.array([0.1], pa.float32()), "0.1"),
    "float16": (pa.array([0.1], pa.float16()), "0.1"),
    "list of float32": (pa.array([[0.3]], pa.list_(pa.float32())), "0.3"),
    "decimal": (pa.array([Decimal("1.50")]), "1.50"),
    "dictionary": (pa.array(["a"]).dictionary_encode(), "a"),
    "text view": (pa.array(["a"], pa.string_view()), "a"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_of_every_kind(name, tmp_path):
    values, text = ANSWERS[name]
    table = pa.table({"picture": [ONE], "ask": ["?"], "say": values})
    (tmp_path / "t.arrow").write_bytes(stream(table))
    assert turns(read(tmp_path)[0])[1] == ("assistant", text)


def test_lists_of_answers_are_cut_or_joined(tmp_path):
    write(tmp_path / "t.parquet", {**columns([ONE]), "say": [["a", " b", "c"]]})
    assert turns(read(tmp_path)[0])[1][1] == "a"
    assert turns(read(tmp_path, answers="join")[0])[1][1] == "a, b, c"
    assert turns(read(tmp_path, answers="join", separator=" | ")[0])[1][1] == "a | b | c"


def test_null_images_are_named_or_just_not_there(tmp_path):
    data = {"first": [ONE, None, None], "second": [{"bytes": TWO}, {"bytes": TWO}, {"bytes": None}]}
    write(tmp_path / "t.parquet", {**data, "ask": ["?"] * 3, "say": ["a"] * 3})
    both = {"image": ["first", "second"]}
    assert reasons(read(tmp_path, **both)) == [None, "schema_error", "schema_error"]
    found = read(tmp_path, **both, null_image="absent")
    assert [item.images for item in found] == [(ONE, TWO), (TWO,), ()]
    fixed = read(tmp_path, **both, null_image="absent", question="<image>{ask}")
    assert reasons(fixed) == ["image_count_mismatch", None, None] and turns(fixed[2])[0][1] == "?"


def test_a_split_that_changes_with_every_row_is_refused(tmp_path):
    write(tmp_path / "t.parquet", {**columns([ONE] * 100), "part": ["train", "test"] * 50})
    with pytest.raises(InputError, match="changes 99 times in 100 rows; sort the table by it"):
        list_parts(tmp_path, (), TableOptions(**MAP, split="part"))


def bad(name, value, kind=None):
    """Return columns of three rows, the middle one with this value."""
    data = {"picture": [ONE] * 3, "ask": ["?"] * 3, "say": ["a"] * 3}
    good = data[name][0]
    return {**data, name: pa.array([good, value, good], kind)}


BAD_ROWS = {
    "null question": (bad("ask", None), "schema_error"),
    "empty answer": (bad("say", " \n"), "empty_target"),
    "null answer": (bad("say", None), "schema_error"),
    "no answer in the list": ({**bad("say", ""), "say": [["a"], [], ["a"]]}, "empty_target"),
    "null in the list": ({**bad("say", ""), "say": [["a"], [None], ["a"]]}, "schema_error"),
    "not a number": ({**bad("say", ""), "say": [1.0, float("nan"), 1.0]}, "schema_error"),
    "slot in the answer": (bad("say", "see <image>"), "special_token_in_text"),
    "null image": (bad("picture", None), "schema_error"),
    "empty image": (bad("picture", b""), "empty"),
    "null in a list of images": ({**bad("ask", "?"), "picture": [[ONE], [None], [ONE]]}, "schema_error"),
    "no image of the list": ({**bad("ask", ""), "picture": [[ONE], [], [ONE]]}, "empty_prompt"),
    "question is not UTF-8": (
        {**bad("ask", ""), "ask": pa.array([b"?", b"\xff", b"?"], pa.binary()).view(pa.string())},
        "schema_error",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_named_and_its_neighbours_stay(name, tmp_path):
    data, reason = BAD_ROWS[name]
    write(tmp_path / "t.parquet", data)
    found = read(tmp_path)
    assert reasons(found)[1] == reason and found[1].key == "t/00000001"
    assert isinstance(found[0], Sample) or name == "no image of the list"


def test_paths_may_begin_at_a_folder_of_the_source(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "1.png").write_bytes(ONE)
    write(tmp_path / "tables" / "t.parquet", columns(["1.png"]))
    assert read(tmp_path, image_root="pictures")[0].images == (ONE,)
    with pytest.raises(InputError, match="image_root='picture' is not a directory"):
        read(tmp_path, image_root="picture")


WRONG = {
    "no such column": (
        {"answer": "says"},
        r"t\.parquet has no column 'says'; .*: picture, ask, say, day; did you mean 'say'",
    ),
    "no such mark": ({"question": "<image>{asks}"}, "has no column 'asks'"),
    "a text that is no column": ({"question": "What is it?"}, "has no column 'What is it"),
    "an image of numbers": ({"image": "day"}, r"column 'day' is date32.*bytes, a struct"),
    "an answer of dates": ({"answer": "day"}, "column 'day' is date32.*text, numbers"),
    "a question of bytes": ({"question": "picture"}, "column 'picture' is binary"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_map_is_named_with_the_file_and_the_columns_there_are(name, tmp_path):
    options, message = WRONG[name]
    write(tmp_path / "t.parquet", {**columns([ONE]), "day": [datetime.date(2020, 1, 1)]})
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, **options)
    assert "\n" not in str(caught.value)


BROKEN_ARROW = {
    "empty": b"",
    "the mark of a file": b"ARROW1",
    "the mark of feather": b"FEA1 and so on",
    "text": b"no table at all" * 50,
    "a stream that breaks off": stream(pa.table(columns([png(i) for i in range(9)])))[:3000],
}


@pytest.mark.parametrize("name", BROKEN_ARROW)
def test_a_file_that_is_no_arrow_or_breaks_off_is_named(name, tmp_path):
    (tmp_path / "t.arrow").write_bytes(BROKEN_ARROW[name])
    with pytest.raises(InputError, match=r"t\.arrow is not a readable Arrow file"):
        read(tmp_path)


def test_a_table_in_a_store_names_pictures_below_it_and_in_any_store(tmp_path):
    paths = ["pictures/1.png", f"s3://{BUCKET}/elsewhere/2.png", "pictures/none.png", "../elsewhere/2.png"]
    here = write(tmp_path / "t.parquet", columns(paths))
    with moto_server():
        top = location(f"s3://{BUCKET}")
        (top / "raw/a/t.parquet").write_bytes(here.read_bytes())
        (top / "raw/a/pictures/1.png").write_bytes(ONE)
        (top / "elsewhere/2.png").write_bytes(TWO)
        found = read(top / "raw")
    assert reasons(found) == [None, None, "image_not_found", "image_not_found"]
    assert [item.images for item in found[:2]] == [(ONE,), (TWO,)]


def test_a_class_number_becomes_its_name_where_the_schema_has_names(tmp_path):
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dog"]}}
    rows = {"image": [png(i) for i in range(4)], "label": [1, 0, 2, None]}
    table = pa.table(rows).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, tmp_path / "pets.parquet")
    settings = {"image": "image", "question": "<image>Which?", "answer": "label"}
    numbers, names = (
        [
            item.detail if isinstance(item, SkippedRow) else item.messages[1].text
            for part in list_parts(tmp_path, (), options)
            for item in iter_part(part, options)
        ]
        for options in (TableOptions(**settings), TableOptions(**settings, class_names=True))
    )
    assert numbers == ["1", "0", "2", "label is null"]
    assert names == ["dog", "cat", "2 is no number of the 2 classes", "label is null"]
    assert "class_names" not in TableOptions(**settings).model_dump()
    found = recognise(tmp_path, ImageLimits(max_pixels=10**6, min_side=1))
    assert found.best.reading.options["class_names"] is True
