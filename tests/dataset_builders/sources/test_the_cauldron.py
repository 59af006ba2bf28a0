"""Raw rows to samples: slots, turns, keys, reasons, and one clear line for an unreadable file."""

import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.readers import table_files
from dataset_builders.readers.parts import SkippedRow, natural_order
from dataset_builders.sources.registry import HUB_SUBSETS
from dataset_builders.sources.the_cauldron import CauldronOptions, iter_part, list_parts
from dataset_builders.storage.store import location, upload_dir
from stages.shared.inputs.raw_source import open_raw
from tests.helpers.json_rows import turns
from tests.helpers.object_store import BUCKET, CuttingProxy, environment, moto_server
from tests.helpers.raw_rows import ROW_SCHEMA, plain_rows, png, row, write_parquet, write_source

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

CHAT, SPLIT = CauldronOptions(turns="chat"), CauldronOptions(turns="split")
ONE, TWO = png(1), png(2)


def read(source, policy=CHAT, subsets=(), rows=None):
    return [item for part in list_parts(source, subsets, CHAT) for item in iter_part(part, policy, rows)]


def read_rows(tmp_path, rows, policy=CHAT):
    return read(write_source(tmp_path, {"s": rows}), policy)


def test_chat_puts_all_pairs_into_one_sample_with_the_slots_first(tmp_path):
    (sample,) = read_rows(tmp_path, [row([ONE, TWO], [("  Which?\n", " the first "), ("Why?", "so\r\nit is")])])
    assert sample.key == "s/00000000" and sample.images == (ONE, TWO)
    assert turns(sample) == [
        ("user", "<image><image>Which?"),
        ("assistant", "the first"),
        ("user", "Why?"),
        ("assistant", "so\nit is"),
    ]


def test_split_makes_a_sample_a_pair_each_with_the_images(tmp_path):
    samples = read_rows(tmp_path, [row([ONE], [("Which?", "a"), ("Why?", "b")])], SPLIT)
    assert [s.key for s in samples] == ["s/00000000-0", "s/00000000-1"]
    assert [turns(s) for s in samples] == [
        [("user", "<image>Which?"), ("assistant", "a")],
        [("user", "<image>Why?"), ("assistant", "b")],
    ]
    assert all(s.images == (ONE,) for s in samples)


def test_own_slots_stay_where_they_are(tmp_path):
    raw = row([ONE, TWO], [("Is <image> like", "yes"), ("or <image>?", "no")])
    (sample,) = read_rows(tmp_path, [raw])
    assert [text for _, text in turns(sample)] == ["Is <image> like", "yes", "or <image>?", "no"]


def test_a_row_of_text_alone_and_a_picture_without_a_question(tmp_path):
    text, picture = read_rows(tmp_path, [row([], [("2 + 2?", "4")]), row([ONE], [("", "noise")])])
    assert text.images == () and turns(text)[0] == ("user", "2 + 2?")
    assert turns(picture)[0] == ("user", "<image>")


def row_of(*images):
    """Return a row of these images, each a struct or null, and one pair of texts."""
    return {"images": list(images), "texts": row([], [("this?", "a")])["texts"]}


BAD_ROWS = {
    "more slots than images": (row([ONE], [("<image> or <image>?", "a")]), "image_count_mismatch"),
    "fewer slots than images": (row([ONE, TWO], [("this <image>?", "a")]), "image_count_mismatch"),
    "slot in an answer": (row([ONE], [("this?", "see <image>")]), "special_token_in_text"),
    "empty answer": (row([ONE], [("this?", " \n")]), "empty_target"),
    "escape character": (row([ONE], [("this\x1b[31m?", "a")]), "control_chars"),
    "no pair": (row([ONE], []), "no_text"),
    "null answer": (row([ONE], [("this?", None)]), "schema_error"),
    "null texts": ({"images": [{"bytes": ONE, "path": None}], "texts": None}, "no_text"),
    "null pair": ({"images": [], "texts": [None]}, "schema_error"),
    "no bytes and no path": (row_of({"bytes": None, "path": None}), "schema_error"),
    "no bytes, a path to nothing": (row_of({"bytes": None, "path": "a.png"}), "image_not_found"),
    "empty bytes": (row([b""], [("this?", "a")]), "empty"),
    "null image": (row_of(None), "schema_error"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_row_is_named_and_its_neighbours_stay(name, tmp_path):
    bad, reason = BAD_ROWS[name]
    before, skipped, after = read_rows(tmp_path, [*plain_rows(1), bad, *plain_rows(1, 5)])
    assert isinstance(skipped, SkippedRow) and (skipped.key, skipped.reason) == ("s/00000001", reason), skipped
    assert isinstance(before, Sample) and isinstance(after, Sample)


def test_split_loses_only_the_bad_pair(tmp_path):
    items = read_rows(tmp_path, [row([ONE], [("a?", "a"), ("b?", ""), ("c?", "c")])], SPLIT)
    assert [(type(item).__name__, item.key[-1]) for item in items] == [
        ("Sample", "0"),
        ("SkippedRow", "1"),
        ("Sample", "2"),
    ]


def test_text_that_is_not_utf8_is_a_row_of_its_own(tmp_path):
    good = pa.Table.from_pylist(plain_rows(3), schema=ROW_SCHEMA)
    broken = pa.array([b"a", b"\xff\xfe", b"c"], pa.binary()).view(pa.string())
    fields = list(ROW_SCHEMA.field("texts").type.value_type)
    pairs = pa.StructArray.from_arrays([broken, pa.array(["x", "y", "z"]), pa.array(["t"] * 3)], fields=fields)
    texts = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), pairs)
    (tmp_path / "s").mkdir()
    pq.write_table(good.set_column(1, ROW_SCHEMA.field("texts"), texts), tmp_path / "s" / "a.parquet")
    first, second, third = read(tmp_path)
    assert isinstance(first, Sample) and isinstance(third, Sample)
    assert (second.key, second.reason) == ("s/00000001", "schema_error") and "UTF-8" in second.detail


def test_files_are_read_in_numeric_order_and_keys_do_not_depend_on_the_cut(tmp_path):
    rows = plain_rows(25)
    many = read(write_source(tmp_path / "many", {"s": rows}, file_rows=2))
    one = read(write_source(tmp_path / "one", {"s": rows}))
    assert len(list((tmp_path / "many" / "s").iterdir())) == 13
    assert many == one and [s.key for s in one] == [f"s/{i:08d}" for i in range(25)]


def test_names_of_the_hub_and_a_file_without_a_row(tmp_path):
    """clevr_math was uploaded with such numbers; an export leaves an empty file for a shard without rows."""
    for number, rows in ((2, plain_rows(1)), (10, plain_rows(2, 5)), (9, []), (100, plain_rows(1, 9))):
        write_parquet(tmp_path / "clevr_math" / f"train-{number}-of-26433.parquet", rows)
    parts = list_parts(tmp_path, (), CHAT)
    assert [(p.name.split("/")[1], p.first_row, p.num_rows) for p in parts] == [
        ("train-2-of-26433.parquet", 0, 1),
        ("train-10-of-26433.parquet", 1, 2),
        ("train-100-of-26433.parquet", 3, 1),
    ]


def test_the_fifty_subsets_by_name(tmp_path):
    names = HUB_SUBSETS["HuggingFaceM4/the_cauldron"]
    write_source(tmp_path, {name: plain_rows(1) for name in names})
    assert len(names) == 50 and [item.subset for item in read(tmp_path)] == sorted(names, key=natural_order)
    chosen = read(tmp_path, subsets=("vqav2", "ai2d"))
    assert [item.subset for item in chosen] == ["ai2d", "vqav2"]
    with pytest.raises(InputError, match="did you mean 'localized_narratives'"):
        list_parts(tmp_path, ("localised_narratives",), CHAT)


def test_an_image_without_bytes_is_read_from_below_the_source(tmp_path):
    rows = [row_of({"bytes": None, "path": path}) for path in ("deep/1.png", "../b/2.png")]
    source = write_source(tmp_path, {"a": rows})
    for name, data in (("a/deep/1.png", ONE), ("b/2.png", TWO)):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(data)
    assert [item.images for item in read(source)] == [(ONE,), (TWO,)]


def test_one_file_is_a_source(tmp_path):
    write_source(tmp_path, {"ai2d": plain_rows(4)}, file_rows=2)
    found = read(tmp_path / "ai2d" / "train-1.parquet")
    assert [item.key for item in found] == ["ai2d/00000000", "ai2d/00000001"]
    assert [item.images for item in found] == [(png(2),), (png(3),)]


@pytest.mark.full
def test_a_source_in_a_store_is_read_by_ranges_and_known_by_its_content(tmp_path, monkeypatch):
    monkeypatch.setenv("ATHANOR_CACHE_DIR", str(tmp_path / "cache"))
    here = write_source(tmp_path / "raw", {"a": plain_rows(40), "b": plain_rows(3, 50)}, file_rows=30, group_rows=10)
    with moto_server():
        there = location(f"s3://{BUCKET}/raw")
        upload_dir(here, there, "a/train-0.parquet")
        assert [p.path.name for p in list_parts(there, ("b",), CHAT)] == ["train-0.parquet"]
        monkeypatch.setattr(s3fs.S3FileSystem, "_get_file", None)  # copies a whole file
        (part, *_) = list_parts(pickle.loads(pickle.dumps(there)), (), CHAT)
        assert [item.key for item in iter_part(part, CHAT, {25})] == ["a/00000025"]
        digest = open_raw(str(there), (), "the_cauldron").digest
        assert open_raw(f"{there}/", (), "the_cauldron").digest == digest
        assert open_raw(str(there), ("a",), "the_cauldron").digest != digest
        (there / "a" / "notes.txt").write_text("not data")
        assert open_raw(str(there), (), "the_cauldron").digest == digest
        same_size = (here / "b" / "train-0.parquet").read_bytes()[:-1] + b"?"
        (there / "b" / "train-0.parquet").write_bytes(same_size)
        assert open_raw(str(there), (), "the_cauldron").digest != digest
        with pytest.raises(InputError, match="holds no file that the builder the_cauldron reads"):
            open_raw(f"s3://{BUCKET}/nothing", (), "the_cauldron")


def test_a_connection_that_is_cut_does_not_change_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("ATHANOR_CACHE_DIR", str(tmp_path / "cache"))
    rows = [row([png(i, 400, 400)], [(f"{i}?", "a")]) for i in range(20)]
    here = write_source(tmp_path / "raw", {"a": rows}, group_rows=20)
    with moto_server() as address, CuttingProxy(address) as proxy:
        upload_dir(here, location(f"s3://{BUCKET}/raw"), "a/train-0.parquet")
        with environment(proxy.address):
            proxy.cut_down += [30_000, 40_000]
            assert read(location(f"s3://{BUCKET}/raw")) == read(here)
        assert proxy.cuts == 2


def test_parts_cover_every_row_once_and_know_its_place_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(table_files, "_PART_ROWS", 4)
    source = write_source(tmp_path, {"b": plain_rows(20), "a": plain_rows(3)}, file_rows=11, group_rows=3)
    parts = list_parts(source, (), CHAT)
    assert [(p.subset, p.name[-9:], p.first_row, p.file_row, p.num_rows) for p in parts] == [
        ("a", "0.parquet", 0, 0, 3),
        ("b", "0.parquet", 0, 0, 6),
        ("b", "0.parquet", 6, 6, 5),
        ("b", "1.parquet", 11, 0, 6),
        ("b", "1.parquet", 17, 6, 3),
    ]
    keys = [item.key for part in parts for item in iter_part(part, CHAT)]
    assert keys == [f"a/{i:08d}" for i in range(3)] + [f"b/{i:08d}" for i in range(20)]
    chosen = [item.key for item in read(source, rows={2, 11, 19})]
    assert chosen == ["a/00000002", "b/00000002", "b/00000011", "b/00000019"]
    assert parts[4].row_in_file("b/00000019") == 8 and parts[4].row_in_file("b/00000019-3") == 8


def test_large_lists_and_empty_image_columns_are_read(tmp_path):
    kinds = {"bytes": pa.large_binary(), "path": pa.string()}
    large = pa.schema(
        [
            ("images", pa.large_list(pa.struct(list(kinds.items())))),
            ("texts", pa.large_list(pa.struct([("user", pa.large_string()), ("assistant", pa.large_string())]))),
        ]
    )
    rows = [{"images": [{"bytes": ONE, "path": None}], "texts": [{"user": "a", "assistant": "b"}]}]
    write_parquet(tmp_path / "s" / "0.parquet", rows, schema=large)
    nothing = pa.schema([("images", pa.list_(pa.null())), ROW_SCHEMA.field("texts")])
    write_parquet(tmp_path / "s" / "1.parquet", [row([], [("a", "b")])], schema=nothing)
    first, second = read(tmp_path)
    assert first.images == (ONE,) and second.images == ()


IMAGES, TEXTS = ROW_SCHEMA.field("images").type, ROW_SCHEMA.field("texts").type


def schema(images=IMAGES, texts=TEXTS):
    return pa.schema([("images", images), ("texts", texts)])


WRONG_SCHEMAS = {
    "no images": (pa.schema([ROW_SCHEMA.field("texts")]), "lacks the column 'images'; it has: texts"),
    "images are text": (schema(images=pa.string()), "column 'images' is string"),
    "bytes are text": (
        schema(images=pa.list_(pa.struct([("bytes", pa.string())]))),
        "field 'bytes' of column 'images' is string",
    ),
    "no assistant": (
        schema(texts=pa.list_(pa.struct([("user", pa.string())]))),
        "field 'assistant' of column 'texts' is missing",
    ),
}


@pytest.mark.parametrize("name", WRONG_SCHEMAS)
def test_file_of_another_schema_is_named_with_the_column(name, tmp_path):
    kind, message = WRONG_SCHEMAS[name]
    write_parquet(tmp_path / "s" / "0.parquet", [], schema=kind)
    with pytest.raises(InputError) as caught:
        list_parts(tmp_path, (), CHAT)
    assert message in str(caught.value) and "0.parquet" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all" * 50])
def test_file_that_is_no_parquet_is_named(content, tmp_path):
    write_source(tmp_path, {"s": plain_rows(2)})
    (tmp_path / "s" / "train-7.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"train-7\.parquet is not a readable parquet file"):
        list_parts(tmp_path, (), CHAT)


def test_file_damaged_in_the_middle_is_named_with_the_row(tmp_path):
    source = write_source(tmp_path, {"s": plain_rows(40)})
    path = source / "s" / "train-0.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 400] = b"\xff" * 400
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"train-0\.parquet breaks off at row \d+"):
        read(source)


def test_missing_directory_missing_subset_and_a_subset_given_as_source(tmp_path):
    write_source(tmp_path, {"ai2d": plain_rows(1), "vqa": plain_rows(1)})
    with pytest.raises(InputError, match=r"nowhere does not exist"):
        list_parts(tmp_path / "nowhere", (), CHAT)
    with pytest.raises(InputError, match=r"no subset 'ai2' in .*; there are: ai2d, vqa"):
        list_parts(tmp_path, ("ai2",), CHAT)
    with pytest.raises(InputError, match=r"it is one subset: give .* and subsets=\[ai2d\]"):
        list_parts(tmp_path / "ai2d", (), CHAT)
    assert [p.subset for p in list_parts(tmp_path, ("vqa",), CHAT)] == ["vqa"]


def test_a_subset_that_cannot_make_keys_is_refused(tmp_path):
    write_source(tmp_path, {"my subset": plain_rows(1)})
    with pytest.raises(InputError, match="my subset: subset 'my subset' cannot be part of a key; rename it"):
        list_parts(tmp_path, (), CHAT)
