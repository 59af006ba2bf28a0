"""The drawn data as files: their builders read them, convert skips no row, and the bytes are the same every time."""

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

from dataset_builders.contracts.sample import Sample, from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.sources.cord_target import from_json, from_tags
from dataset_builders.sources.cord_v2 import PROMPTS
from flows.pipeline.recipe import load_recipe
from stages.convert.stage import STAGE as CONVERT
from stages.shared.artifacts.artifact import External
from stages.shared.artifacts.run_stage import run_stage
from tests.helpers.drawn.suite import SUBSETS, iter_cord_splits, iter_suite_rows
from tests.helpers.drawn.write import ROW_SCHEMA, SUITE_YAML, write_receipts, write_suite
from tests.helpers.json_rows import read_source, turns
from tests.helpers.raw_rows import CORD_SCHEMA
from tests.helpers.trees import tree_digest

pytestmark = pytest.mark.full  # a dataset of the tests alone

FEW = dict.fromkeys(SUBSETS, 6)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return write_suite(tmp_path_factory.mktemp("suite"), FEW)


@pytest.fixture(scope="module")
def receipts(tmp_path_factory):
    return write_receipts(tmp_path_factory.mktemp("receipts"), 20)


def test_the_cauldron_reads_every_row(suite):
    samples = read_source("the_cauldron", suite, turns="chat")
    assert all(isinstance(sample, Sample) for sample in samples)
    assert Counter(sample.subset for sample in samples) == FEW
    assert pq.read_schema(suite / "ai2d" / "train-00000-of-00001.parquet").equals(ROW_SCHEMA)


def test_references_are_those_of_the_rows(suite):
    samples = read_source("the_cauldron", suite, turns="chat")
    for sample in samples:
        answers = [message for message in sample.messages if message.role == "assistant"]
        if sample.subset in ("textcaps", "textvqa"):
            assert [len(answer.references) for answer in answers] == [5 if sample.subset == "textcaps" else 10]
        elif sample.subset != "docvqa":
            assert not any(answer.references for answer in answers)
        assert not any(message.references for message in sample.messages if message.role == "user")
        for answer in answers:
            assert sample.subset == "textvqa" or not answer.references or answer.text in answer.references


def test_it_is_converted_by_the_recipe_without_a_skip(suite, tmp_path):
    config = load_recipe(str(SUITE_YAML)).config.convert
    made = run_stage(CONVERT, config, {"raw": External(suite, "raw", "0" * 16)}, tmp_path).artifact
    assert made.manifest.skips == {} and sum(shard.num_samples for shard in made.manifest.shards) == 36
    records = [record for shard in made.manifest.shards for record in iter_records(made.dir / shard.name)]
    converted = {key: from_fields(key, fields) for key, fields in records}
    assert converted == {sample.key: sample for sample in read_source("the_cauldron", suite, turns="chat")}


def test_rebuilt_it_has_the_same_bytes_and_another_seed_or_number_draws_another_picture(suite, tmp_path):
    assert tree_digest(write_suite(tmp_path, FEW)) == tree_digest(suite)
    rows = [row for seed in (0, 1) for _, row in iter_suite_rows(seed, FEW)]
    assert len({row["images"][0]["bytes"] for row in rows}) == len(rows) == 2 * sum(FEW.values())
    assert [row for _, row in iter_suite_rows(0, {"docvqa": 5})] == rows[6:11]  # whatever the number of rows


@pytest.mark.parametrize(("target", "inverse"), [("json", from_json), ("donut", from_tags)])
def test_a_receipt_from_raw_row_to_target_and_exactly_back(target, inverse, receipts):
    samples = read_source("cord_v2", receipts, target=target)
    rows = [row for _, row in iter_cord_splits(0, 20)]
    assert len(samples) == len(rows) == 20
    for sample, row in zip(samples, rows):
        (role, question), (_, answer) = turns(sample)
        parse = json.loads(row["ground_truth"])["gt_parse"]
        assert (role, question) == ("user", "<image>" + PROMPTS[target]) and sample.images == (row["image"]["bytes"],)
        assert inverse(answer) == parse
    menus = Counter(type(inverse(turns(sample)[1][1])["menu"]) for sample in samples)
    assert menus[dict] > 0 and menus[list] > 0


@pytest.mark.parametrize("target", ["json", "donut"])
def test_receipts_are_converted_with_cords_splits(target, receipts, tmp_path):
    changes = {"convert.builder": "cord_v2", "convert.options": {"target": target}}
    config = load_recipe(str(SUITE_YAML), changes=changes).config.convert
    made = run_stage(CONVERT, config, {"raw": External(receipts, "raw", "0" * 16)}, tmp_path).artifact
    assert made.manifest.skips == {}
    numbers = Counter()
    for shard in made.manifest.shards:
        numbers[shard.split] += shard.num_samples
    assert numbers == {"train": 16, "heldout": 4}


def test_cords_files_have_its_schema_and_names(receipts):
    names = sorted(path.name for path in (receipts / "data").iterdir())
    assert names == [f"{split}-00000-of-00001.parquet" for split in ("test", "train", "validation")]
    assert all(pq.read_schema(receipts / "data" / name).equals(CORD_SCHEMA) for name in names)
