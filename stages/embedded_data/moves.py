"""embedded_moves: drawn clips of shapes that move, as parquet files that the builder openai_messages reads; no input.

moves_what/train-00000-of-00008.parquet ...   moves_where/...   moves_when/...
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from dataset_builders.sources.moves import MoveCounts, Row, iter_move_rows
from stages.embedded_data.digits import write_subset
from stages.shared.artifacts.artifact import Stage, StageOutput
from stages.shared.inputs.config import EmbeddedMovesConfig
from stages.shared.pages.report import Table, write_report

VERSION = 1

ROW_SCHEMA = pa.schema(
    [
        ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("videos", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
    ]
)


def _run(config: EmbeddedMovesConfig, inputs: Mapping[str, object], work: Path, resources: object) -> StageOutput:
    subsets: dict[str, list[Row]] = {}
    counts = MoveCounts(
        what=config.num_what,
        where=config.num_where,
        when=config.num_when,
        fps=config.fps,
        frames=config.num_frames,
        side=config.side,
    )
    for subset, row in iter_move_rows(config.seed, counts):
        subsets.setdefault(subset, []).append(row)
    answers = Counter()
    for subset, rows in subsets.items():
        write_subset(work / subset, rows, "train", ROW_SCHEMA)
        answers.update((subset, row["messages"][1]["content"]) for row in rows)
    rows_of = {subset: len(rows) for subset, rows in subsets.items()}
    table = [[subset, answer, number] for (subset, answer), number in answers.most_common(40)]
    sections = [Table("Most frequent answers", ["subset", "answer", "rows"], table)]
    write_report(work, title="Clips of shapes that move", summary={"rows": sum(rows_of.values())}, sections=sections)
    return StageOutput(stats={"rows": rows_of})


STAGE = Stage("embedded_moves", VERSION, _run, on_disk=True, digested=("*/*.parquet",))
