"""The drawn receipts: CORD-V2's schema, read by its builder, fields where their boxes are, the same bytes twice."""

import io
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dataset_builders.contracts.sample import Sample
from dataset_builders.embedded.receipts import make_receipt, parse_of, receipt_row
from dataset_builders.sources.cord_target import from_json
from dataset_builders.sources.cord_v2 import CordOptions, iter_part, list_parts
from stages.artifacts.run_stage import run_stage
from stages.artifacts.workers import StageResources
from stages.inputs.config import EmbeddedReceiptsConfig
from stages.inputs.receipts import ROW_SCHEMA, STAGE
from tests.helpers.trees import tree_digest

pytestmark = pytest.mark.promise(
    "A receipt goes from raw row to nTED, as JSON and as tags, with an exact inverse; drawn receipts have "
    "CORD-V2's schema."
)

FEW = EmbeddedReceiptsConfig(kind="receipts", seed=0, num_train=6, num_strips=12, num_heldout=4)


def test_cord_v2_reads_every_row(tmp_path):
    artifact = run_stage(STAGE, FEW, {}, tmp_path, StageResources()).artifact
    options = CordOptions(heldout_splits=("validation",))
    parts = list_parts(artifact.dir, (), options)
    samples = [item for part in parts for item in iter_part(part, options)]
    assert all(isinstance(sample, Sample) for sample in samples) and len(samples) == 6 + 12 + 4
    rows = [row for part in parts for row in pq.read_table(part.path).to_pylist()]
    parses = [json.loads(row["ground_truth"])["gt_parse"] for row in rows]
    assert [from_json(sample.messages[1].text) for sample in samples] == parses
    assert pq.read_schema(parts[0].path).equals(ROW_SCHEMA)
    assert (artifact.dir / "report.html").is_file()


def test_one_process_and_two_make_the_same_bytes(tmp_path):
    resources = {name: StageResources(num_workers=workers) for name, workers in (("a", 1), ("b", 2))}
    one, two = (run_stage(STAGE, FEW, {}, tmp_path / name, each).artifact.dir for name, each in resources.items())
    assert tree_digest(one) == tree_digest(two)


def test_each_receipt_is_drawn_anew():
    rows = [receipt_row(seed, split, i) for seed in (0, 1) for split in ("train", "validation") for i in range(20)]
    assert len({row["ground_truth"] for row in rows}) == len({row["image"]["bytes"] for row in rows}) == len(rows)


def test_the_sums_of_a_parse_are_those_of_its_items():
    for seed in range(50):
        receipt = make_receipt(np.random.default_rng(seed))
        parse = parse_of(receipt)
        items = parse["menu"] if isinstance(parse["menu"], list) else [parse["menu"]]
        prices = [
            price for item in items for price in (item["price"], *([item["sub"]["price"]] if "sub" in item else []))
        ]
        number = {key: int(text.replace(receipt.separator, "")) for key, text in parse["sub_total"].items()}
        assert sum(int(price.replace(receipt.separator, "")) for price in prices) == number["subtotal_price"]
        total = int(parse["total"]["total_price"].replace(receipt.separator, ""))
        added = number.get("service_price", 0) + number.get("tax_price", 0) - number.get("discount_price", 0)
        assert total == number["subtotal_price"] + added


def test_a_box_holds_the_ink_of_its_words():
    for index in range(8):
        row = receipt_row(0, "train", index)
        grey = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"]))).astype(np.float32)
        paper = np.median(grey)
        for line in json.loads(row["ground_truth"])["valid_line"]:
            for word in line["words"]:
                xs, ys = ([word["quad"][f"{axis}{n}"] for n in range(1, 5)] for axis in "xy")
                box = grey[max(0, min(ys)) : max(ys) + 1, max(0, min(xs)) : max(xs) + 1]
                assert box.min() < paper - 60, word["text"]
