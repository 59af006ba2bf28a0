"""Other right answers of a message: kept with it, but ignored when two samples are compared."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset_builders.contracts.sample import Message, Sample, SkipSample, from_fields, to_fields
from dataset_builders.errors import InputError
from stages.shared.scoring.metrics.contract import Judged
from stages.shared.scoring.metrics.texts import ANLS
from tests.helpers.drawn.write import ROW_SCHEMA
from tests.helpers.json_rows import read_source, reasons
from tests.helpers.raw_rows import png, write_parquet
from tests.helpers.raw_rows import row as cauldron_row

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)


def sample(*references: str) -> Sample:
    answer = Message(role="assistant", text="a cat", references=references)
    return Sample(key="pets/00000001", messages=(Message(role="user", text="What is it?"), answer), images=())


def test_they_come_back_and_change_no_digest():
    several = sample("a cat", "cat", "a cat")
    assert from_fields(several.key, to_fields(several)) == several
    assert several.digest() == sample().digest()
    with pytest.raises(SkipSample, match="not Unicode"):
        sample("a cat", "\ud800").check()


def test_a_message_without_them_is_written_as_before():
    record = json.loads(to_fields(sample())["json"])
    assert record["messages"][1] == {"role": "assistant", "text": "a cat"}
    assert from_fields("pets/00000001", to_fields(sample())) == sample()


def pair(references, answer="a cat"):
    return {"user": "What is it?", "assistant": answer, "source": "test", "references": references}


def write_pairs(tmp_path, *rows, schema=ROW_SCHEMA):
    rows = [{"images": [{"bytes": png(i), "path": None}], "texts": pairs} for i, pairs in enumerate(rows)]
    write_parquet(tmp_path / "pets" / "train-0.parquet", rows, schema=schema)


def test_the_cauldron_takes_them_from_a_pair(tmp_path):
    write_pairs(tmp_path, [pair([" cat ", "a\r\ncat", "cat"]), pair(None), pair([])])
    (sample,) = read_source("the_cauldron", tmp_path, turns="chat")
    assert [message.references for message in sample.messages] == [(), ("cat", "a\ncat", "cat"), (), (), (), ()]
    split = read_source("the_cauldron", tmp_path, turns="split")
    assert [item.messages[1].references for item in split] == [("cat", "a\ncat", "cat"), (), ()]


def test_the_cauldron_names_a_null_among_them_and_its_neighbour_stays(tmp_path):
    write_pairs(tmp_path, [pair(["cat", None])], [pair(["cat"])])
    bad, good = read_source("the_cauldron", tmp_path, turns="chat")
    assert (bad.reason, bad.detail) == ("schema_error", "texts[0] has a null among its references")
    assert good.messages[1].references == ("cat",)


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.int64())])
def test_the_cauldron_refuses_another_kind_in_one_line(kind, tmp_path):
    text = pa.struct([*((name, pa.string()) for name in ("user", "assistant", "source")), ("references", kind)])
    schema = pa.schema([ROW_SCHEMA.field("images"), ("texts", pa.list_(text))])
    write_pairs(tmp_path, [pair(None)], schema=schema)
    with pytest.raises(InputError, match=r"train-0\.parquet: field 'references' of column 'texts' is .*, not list"):
        read_source("the_cauldron", tmp_path, turns="chat")


TABLE = {"image": None, "question": "ask", "answer": "say"}


def write_table(path, references):
    columns = {"ask": ["How many?"] * len(references), "say": ["two"] * len(references), "all": references}
    pq.write_table(pa.table(columns), path)


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([["two", "2", "two"], None, []]), [("two", "2", "two"), (), ()]),
        (pa.array([2, 3]), [("2",), ("3",)]),
    ],
    ids=["lists", "numbers"],
)
def test_a_table_takes_them_from_a_column(column, expected, tmp_path):
    write_table(tmp_path / "t.parquet", column)
    found = read_source("table", tmp_path, **TABLE, references="all")
    assert [item.messages[1].references for item in found] == expected
    assert not any(item.messages[1].references for item in read_source("table", tmp_path, **TABLE))


def test_a_tables_answers_are_the_first_of_a_list_and_all_of_it(tmp_path):
    write_table(tmp_path / "t.parquet", pa.array([["two", "2"]]))
    (item,) = read_source("table", tmp_path, **TABLE | {"answer": "all"}, references="all")
    assert (item.messages[1].text, item.messages[1].references) == ("two", ("two", "2"))


def test_a_row_of_a_table_with_a_null_among_them_is_left_out(tmp_path):
    write_table(tmp_path / "t.parquet", pa.array([["two", None], ["two"]]))
    assert reasons(read_source("table", tmp_path, **TABLE, references="all")) == ["schema_error", None]


def test_a_table_refuses_a_column_of_another_kind_before_it_reads_a_row(tmp_path):
    write_table(tmp_path / "t.parquet", pa.array([b"two"]))
    with pytest.raises(
        InputError, match=r"t\.parquet: column 'all' is binary; text, numbers, true and false, or a list"
    ):
        read_source("table", tmp_path, **TABLE, references="all")


@pytest.mark.parametrize(
    ("subset", "answer", "references"),
    [
        ("docvqa", "Yes.", ("Yes.", "Yes")),
        ("docvqa", "14", ()),
        ("docvqa", "and so on...", ()),
        ("st_vqa", "Coca-Cola Inc.", ("Coca-Cola Inc.", "Coca-Cola Inc")),
        ("pets", "Yes.", ()),
    ],
)
def test_the_cauldrons_full_stop_does_not_count_in_documents(tmp_path, subset, answer, references):
    write_parquet(tmp_path / subset / "train-0.parquet", [cauldron_row([png(1)], [("What?", answer)])])
    (sample,) = read_source("the_cauldron", tmp_path, turns="chat")
    assert sample.messages[1].references == references
    judged = Judged(question="What?", references=references or (answer,), answer=answer.removesuffix("."))
    assert not references or ANLS().score([judged]) == 1.0


def test_references_that_are_given_stay_alone(tmp_path):
    rows = [{"images": [{"bytes": png(1), "path": None}], "texts": [pair(["a dog"], "A cat.")]}]
    write_parquet(tmp_path / "docvqa" / "train-0.parquet", rows, schema=ROW_SCHEMA)
    (sample,) = read_source("the_cauldron", tmp_path, turns="chat")
    assert sample.messages[1].references == ("a dog",)
