"""Receipts to samples: both targets and their inverses, splits by file name, and the odd rows by their reason."""

import json

import pyarrow as pa
import pytest
from pydantic import ValidationError

from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.readers.parts import SkippedRow
from dataset_builders.sources.cord_target import from_json, from_tags
from dataset_builders.sources.cord_v2 import PROMPTS, CordOptions, list_parts, patterns
from tests.helpers.json_rows import read_source, reasons, turns
from tests.helpers.raw_rows import CORD_SCHEMA, cord_row, encode, picture, png, write_parquet

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

JPEG = encode(picture(1), "JPEG")
META = {"version": "2.0.0", "split": "train", "image_id": 0, "image_size": {"width": 864, "height": 1296}}
LINE = {
    "words": [{"quad": {"x1": 1, "y1": 2}, "is_key": 0, "row_id": 2179893, "text": "Nasi"}],
    "category": "menu.nm",
    "group_id": 3,
    "sub_group_id": 0,
}
MANY = {"menu": [{"nm": "Nasi", "cnt": "2"}, {"nm": "Teh", "price": "4.000"}], "total": {"total_price": "9.000"}}
ONE_ITEM = {"menu": {"nm": "Nasi", "price": "9.000"}, "total": {"total_price": ["9.000", "9,000"]}}


def truth(parse, **more):
    return {"gt_parse": parse, "meta": META, "valid_line": [LINE], "roi": {}, "repeating_symbol": [], **more}


def read(source, **options):
    return read_source("cord_v2", source, **options)


def read_rows(tmp_path, rows, **options):
    write_parquet(tmp_path / "data" / "train-00000-of-00001-abc.parquet", rows, schema=CORD_SCHEMA)
    return read(tmp_path, **options)


@pytest.mark.parametrize(("target", "inverse"), [("json", from_json), ("donut", from_tags)])
def test_a_receipt_and_its_way_back(target, inverse, tmp_path):
    rows = [cord_row(JPEG, truth(MANY)), cord_row(png(2), truth(ONE_ITEM))]
    first, second = read_rows(tmp_path, rows, target=target)
    assert (first.key, second.key) == ("cord_v2_train/00000000", "cord_v2_train/00000001")
    assert first.images == (JPEG,) and second.images == (png(2),)
    (role, question), (_, answer) = turns(first)
    assert (role, question) == ("user", "<image>" + PROMPTS[target]) and inverse(answer) == MANY
    assert inverse(turns(second)[1][1]) == ONE_ITEM  # a menu of one item stays the item itself


def test_what_is_learnt_is_this_text(tmp_path):
    rows = [cord_row(JPEG, truth(ONE_ITEM))]
    (sample,) = read_rows(tmp_path, rows, prompt="What was bought?")
    assert turns(sample) == [
        ("user", "<image>What was bought?"),
        ("assistant", '{"menu":{"nm":"Nasi","price":"9.000"},"total":{"total_price":["9.000","9,000"]}}'),
    ]
    (sample,) = read(tmp_path, target="donut")
    assert turns(sample)[1][1] == (
        "<s_total><s_total_price>9.000<sep/>9,000</s_total_price></s_total>"
        "<s_menu><s_price>9.000</s_price><s_nm>Nasi</s_nm></s_menu>"
    )


def test_several_right_parses(tmp_path):
    row = cord_row(JPEG, {"gt_parses": [MANY, ONE_ITEM], "meta": META})
    (first,) = read_rows(tmp_path, [row])
    assert first.key == "cord_v2_train/00000000" and from_json(turns(first)[1][1]) == MANY
    both = read(tmp_path, parses="all")
    assert [item.key for item in both] == ["cord_v2_train/00000000-0", "cord_v2_train/00000000-1"]
    assert [from_json(turns(item)[1][1]) for item in both] == [MANY, ONE_ITEM]


def test_the_files_names_say_the_split(tmp_path):
    for split, count in (("test", 1), ("train", 3), ("validation", 2)):
        rows = [cord_row(png(i), truth(MANY)) for i in range(count)]
        write_parquet(tmp_path / "data" / f"{split}-00000-of-00001.parquet", rows, schema=CORD_SCHEMA)
    parts = list_parts(tmp_path, (), CordOptions())
    assert [(p.subset, p.split, p.num_rows) for p in parts] == [
        ("cord_v2_train", "train", 3),
        ("cord_v2_validation", "heldout", 2),
        ("cord_v2_test", "heldout", 1),
    ]
    only = list_parts(tmp_path, ("cord_v2_test",), CordOptions(heldout_splits=("test",)))
    assert [(p.subset, p.split) for p in only] == [("cord_v2_test", "heldout")]
    some = list_parts(tmp_path, (), CordOptions(heldout_splits=("test",)))
    assert [p.split for p in some] == ["train", "train", "heldout"]
    assert [p.split for p in list_parts(tmp_path, (), CordOptions(heldout_splits=()))] == [None] * 3
    (alone,) = list_parts(tmp_path / "data" / "test-00000-of-00001.parquet", (), CordOptions())
    assert alone.subset == "cord_v2_test"


BAD_ROWS = {
    "no JSON": (cord_row(JPEG, "gt_parse: menu"), "json_parse_error"),
    "a key twice": (cord_row(JPEG, '{"gt_parse": {"a": "b", "a": "c"}}'), "json_parse_error"),
    "null": (cord_row(JPEG, None), "schema_error"),
    "a list": (cord_row(JPEG, [MANY]), "schema_error"),
    "neither key": (cord_row(JPEG, {"meta": META, "valid_line": [LINE]}), "schema_error"),
    "no parses": (cord_row(JPEG, {"gt_parses": []}), "schema_error"),
    "parses are no list": (cord_row(JPEG, {"gt_parses": MANY}), "schema_error"),
    "parse is a list": (cord_row(JPEG, {"gt_parses": [[MANY]]}), "schema_error"),
    "empty parse": (cord_row(JPEG, {"gt_parse": {}}), "empty_target"),
    "image slot": (cord_row(JPEG, truth({"menu": {"nm": "<image>"}})), "special_token_in_text"),
    "half a character": (cord_row(JPEG, '{"gt_parse": {"nm": "\\ud83d"}}'), "schema_error"),
    "no image": ({"image": None, "ground_truth": json.dumps(truth(MANY))}, "schema_error"),
    "a path to nothing": (cord_row(None, truth(MANY), "receipt_00000.png"), "image_not_found"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_named_and_its_neighbours_stay(name, tmp_path):
    bad, reason = BAD_ROWS[name]
    good = cord_row(JPEG, truth(MANY))
    before, skipped, after = read_rows(tmp_path, [good, bad, good])
    assert isinstance(skipped, SkippedRow) and (skipped.key, skipped.reason) == ("cord_v2_train/00000001", reason)
    assert isinstance(before, Sample) and isinstance(after, Sample)


def test_what_has_no_form_in_tags(tmp_path):
    parses = [{"nm": "a <s_nm> b"}, {"cnt": 2}, {"a": [["b"]]}, {"a<b": "c"}, {"nm": "2\n1"}]
    rows = [cord_row(JPEG, truth(parse)) for parse in parses]
    found = read_rows(tmp_path, rows, target="donut")
    assert reasons(found) == ["special_token_in_text", "schema_error", "schema_error", "schema_error", None]
    assert [from_json(turns(item)[1][1]) for item in read(tmp_path)] == parses


def test_control_characters_are_escaped_in_json_and_left_out_in_tags(tmp_path):
    rows = [cord_row(JPEG, truth({"nm": "a\x1bb"}))]
    assert from_json(turns(read_rows(tmp_path, rows)[0])[1][1]) == {"nm": "a\x1bb"}
    assert reasons(read(tmp_path, target="donut")) == ["control_chars"]


def test_what_is_wrong_with_a_source_is_said_in_one_line(tmp_path):
    def refused(message, subsets=()):
        with pytest.raises(InputError, match=message) as caught:
            list_parts(tmp_path, subsets, CordOptions())
        assert "\n" not in str(caught.value)

    refused("holds no train-, validation- or test-")
    write_parquet(tmp_path / "train-0.parquet", [cord_row(JPEG, truth(MANY))], schema=CORD_SCHEMA)
    refused("no subset 'cord_v2_test' in .*: it holds no test-", ("cord_v2_test",))
    refused("did you mean 'cord_v2_train'", ("cord_v2_trian",))
    write_parquet(tmp_path / "part-0.parquet", [], schema=CORD_SCHEMA)
    refused(r"part-0\.parquet: its name says no split")
    (tmp_path / "part-0.parquet").unlink()
    write_parquet(tmp_path / "train-1.parquet", [], schema=pa.schema([("image", pa.binary())]))
    refused(r"train-1\.parquet lacks the column 'ground_truth'; it has: image")
    kinds = {"image": CORD_SCHEMA.field("image").type, "ground_truth": pa.binary()}
    write_parquet(tmp_path / "train-1.parquet", [], schema=pa.schema(list(kinds.items())))
    refused("column 'ground_truth' is binary, not text")


def test_patterns_name_the_files_of_the_hub():
    assert patterns(())[:2] == ("*.parquet", "*/*.parquet")
    assert patterns(["cord_v2_test"])[:2] == ("test*.parquet", "*/test*.parquet")


def test_a_prompt_holds_no_tag():
    with pytest.raises(ValidationError, match="prompt"):
        CordOptions(prompt="<image>What?")
