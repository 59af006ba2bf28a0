"""embedded_receipts: drawn receipts as parquet files in the schema of CORD-V2; no input, no network.

train-00000-of-00120.parquet ...   train-strips-00000-of-00480.parquet ...   validation-00000-of-00001.parquet
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builders.embedded.receipts import receipt_row, strip_row
from dataset_builders.sources.cord_target import to_json
from dataset_builders.storage.files import atomic_path
from stages.artifacts.artifact import Stage, StageOutput
from stages.artifacts.workers import StageResources, run_tasks
from stages.inputs.config import EmbeddedReceiptsConfig
from stages.pages.report import Pictures, Table, write_report

VERSION = 2  # 2: slips are 480 pixels wide

ROW_SCHEMA = pa.schema(
    [
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("ground_truth", pa.string()),
    ]
)
_STRIPS = "train-strips"
_FILE_ROWS = 500
_GROUP_ROWS = 100
_SHOWN = 12  # receipts in the report, and also the number of strips


def _run(
    config: EmbeddedReceiptsConfig, inputs: Mapping[str, object], work: Path, resources: StageResources
) -> StageOutput:
    counts = {"train": config.num_train, _STRIPS: config.num_strips, "validation": config.num_heldout}
    tasks = []
    for split, count in counts.items():
        starts = range(0, count, _FILE_ROWS)
        for i, start in enumerate(starts):
            path = work / f"{split}-{i:05d}-of-{len(starts):05d}.parquet"
            tasks.append((path, split, start, min(count, start + _FILE_ROWS)))
    for finished, _ in enumerate(run_tasks(partial(_write_file, config.seed), tasks, resources), 1):
        resources.report(finished, len(tasks))
    _write_report(work, config, counts)
    return StageOutput(stats={"rows": counts})


def _write_file(seed: int, task: tuple[Path, str, int, int]) -> None:
    """Write the rows [start, end) of a split; keep a file that an earlier run finished."""
    path, split, start, end = task
    if path.exists():
        return
    row_of = partial(strip_row, seed) if split == _STRIPS else partial(receipt_row, seed, split)
    table = pa.Table.from_pylist([row_of(i) for i in range(start, end)], schema=ROW_SCHEMA)
    with atomic_path(path) as tmp:
        pq.write_table(table, tmp, row_group_size=_GROUP_ROWS, compression="zstd")


def _write_report(work: Path, config: EmbeddedReceiptsConfig, counts: Mapping[str, int]) -> None:
    """Write the report: counts, and some receipts with their parses."""
    pictures = []
    rows = [receipt_row(config.seed, "train", i) for i in range(min(_SHOWN, config.num_train))]
    rows += [strip_row(config.seed, i) for i in range(min(_SHOWN, config.num_strips))]
    for row in rows:
        parse = json.loads(row["ground_truth"])["gt_parse"]
        pictures.append((row["image"]["bytes"], to_json(parse)))
    sections = [Table("Files", ["begin with", "rows"], list(counts.items())), Pictures("Raw rows", pictures)]
    write_report(work, title="Drawn receipts as raw rows", summary={"rows": sum(counts.values())}, sections=sections)


STAGE = Stage("embedded_receipts", VERSION, _run, on_disk=True, dataset="raw", digested=("*.parquet",))
