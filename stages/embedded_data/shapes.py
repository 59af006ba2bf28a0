"""embedded_shapes: drawn shapes to be found, as parquet files that the builder openai_messages reads; no input.

shapes_one/train-00000-of-00008.parquet ...   shapes_many/train-00000-of-00004.parquet ...
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from dataset_builders.sources.shapes import Row, ShapeCounts, iter_shape_rows
from stages.embedded_data.digits import write_subset
from stages.shared.artifacts.artifact import Stage, StageOutput
from stages.shared.inputs.config import EmbeddedShapesConfig
from stages.shared.pages.report import Table, write_report

VERSION = 1

ROW_SCHEMA = pa.schema(
    [
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
    ]
)


def _run(config: EmbeddedShapesConfig, inputs: Mapping[str, object], work: Path, resources: object) -> StageOutput:
    subsets: dict[str, list[Row]] = {}
    counts = ShapeCounts(one=config.num_one, many=config.num_many, most=config.most_shapes, sides=tuple(config.sides))
    for subset, row in iter_shape_rows(config.seed, counts):
        subsets.setdefault(subset, []).append(row)
    boxes = {}
    for subset, rows in subsets.items():
        write_subset(work / subset, rows, "train", ROW_SCHEMA)
        boxes[subset] = Counter(len(json.loads(row["messages"][1]["content"])) for row in rows)
    numbers = sorted(set().union(*boxes.values()))
    table = [[subset, *(count[number] for number in numbers)] for subset, count in boxes.items()]
    columns = ["subset", *(f"{number} boxes" for number in numbers)]
    rows_of = {subset: count.total() for subset, count in boxes.items()}
    sections = [Table("Rows by the number of boxes in the answer", columns, table)]
    write_report(work, title="Shapes to be found", summary={"rows": sum(rows_of.values())}, sections=sections)
    return StageOutput(stats={"rows": rows_of})


STAGE = Stage("embedded_shapes", VERSION, _run, on_disk=True, digested=("*/*.parquet",))
