"""embedded_data: scikit-learn's digit scans as parquet files in the_cauldron's schema; no input, no network.

digits_single/train-00000-of-00004.parquet ...   digits_multi/   digits_compare/   digits_text/   digits_words/
"""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builders.sources.embedded import DigitCounts, Row, iter_digit_rows
from dataset_builders.storage.files import atomic_path
from stages.shared.artifacts.artifact import Stage, StageOutput
from stages.shared.inputs.config import EmbeddedDataConfig
from stages.shared.pages.report import Table, write_report

VERSION = 1

ROW_SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("texts", pa.list_(pa.struct([("user", pa.string()), ("assistant", pa.string()), ("source", pa.string())]))),
    ]
)
_FILE_ROWS = 500
_GROUP_ROWS = 100


def _run(config: EmbeddedDataConfig, inputs: Mapping[str, object], work: Path, resources: object) -> StageOutput:
    sizes = {"multi": config.num_multi, "pairs": config.num_pairs, "texts": config.num_texts, "words": config.num_words}
    counts = DigitCounts(scans=config.num_scans, **sizes)
    subsets: dict[str, list[Row]] = {}
    for subset, row in iter_digit_rows(config.seed, counts):
        subsets.setdefault(subset, []).append(row)
    for subset, rows in subsets.items():
        write_subset(work / subset, rows, "train")
    write_rows_report(work, "Handwritten digits", subsets)
    return StageOutput(stats={"rows": {subset: len(rows) for subset, rows in subsets.items()}})


def write_subset(directory: Path, rows: list[Row], split: str, schema: pa.Schema = ROW_SCHEMA) -> None:
    """Write the rows of a subset into files that are named after their split."""
    directory.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(rows), _FILE_ROWS)
    for i, start in enumerate(starts):
        table = pa.Table.from_pylist(rows[start : start + _FILE_ROWS], schema=schema)
        with atomic_path(directory / f"{split}-{i:05d}-of-{len(starts):05d}.parquet") as tmp:
            pq.write_table(table, tmp, row_group_size=_GROUP_ROWS, compression="zstd")


def write_rows_report(work: Path, title: str, subsets: Mapping[str, list[Row]]) -> None:
    """Write the report: the numbers of each subset. The page of convert shows the rows themselves."""
    columns = ["subset", "rows", "questions", "distinct pictures"]
    counts = [
        [name, len(rows), sum(len(r["texts"]) for r in rows), len({i["bytes"] for r in rows for i in r["images"]})]
        for name, rows in subsets.items()
    ]
    summary = {"rows": sum(len(rows) for rows in subsets.values())}
    write_report(work, title=title, summary=summary, sections=[Table("Subsets", columns, counts)])


STAGE = Stage("embedded_data", VERSION, _run, on_disk=True, digested=("*/*.parquet",))
