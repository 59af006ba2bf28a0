"""drawn_data: small drawn sets in the shapes of real ones, as parquet files; no input, no network.

layout: the_cauldron   chartqa/train-00000-of-00001.parquet  docvqa/  ai2d/  textcaps/  textvqa/  cord_v2/
                       the_cauldron's schema, and in each pair of texts a list `references`, null where there are none
layout: cord_v2        data/train-00000-of-00001.parquet  data/validation-...  data/test-...
                       receipts alone, in CORD-V2's schema, for the builder cord_v2
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.drawn.receipts import CordRow
from dataset_builders.drawn.rows import Row
from dataset_builders.drawn.suite import SUBSETS, iter_cord_splits, iter_suite_rows
from stages.artifact import Stage, StageOutput
from stages.embedded_data import write_raw_report, write_subset

VERSION = 1

_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_TEXT = [("user", pa.string()), ("assistant", pa.string()), ("source", pa.string())]
ROW_SCHEMA = pa.schema(
    [
        ("images", pa.list_(_IMAGE)),
        ("texts", pa.list_(pa.struct([*_TEXT, ("references", pa.list_(pa.string()))]))),
    ]
)
CORD_SCHEMA = pa.schema([("image", _IMAGE), ("ground_truth", pa.string())])


class DrawnDataConfig(StrictModel):
    """The drawn data: how much of each set, and from which seed."""

    kind: Literal["drawn"] = Field(description="drawn pictures, and not the embedded digits")
    seed: int = Field(ge=0, description="seed of everything that is drawn and asked")
    layout: Literal["the_cauldron", "cord_v2"] = Field(
        default="the_cauldron", description="all sets for the builder the_cauldron, or receipts alone for cord_v2"
    )
    num_chartqa: int = Field(default=200, ge=0, le=2000, description="charts, with one or two questions each")
    num_docvqa: int = Field(default=200, ge=0, le=2000, description="pages, with two or three questions each")
    num_ai2d: int = Field(
        default=200, ge=0, le=2000, description="diagrams, with one or two multiple-choice questions each"
    )
    num_textcaps: int = Field(default=200, ge=0, le=2000, description="scenes with five captions each")
    num_textvqa: int = Field(
        default=200, ge=0, le=2000, description="scenes with a question and ten annotators' answers each"
    )
    num_cord_v2: int = Field(
        default=200, ge=0, le=2000, description="receipts; of layout cord_v2 those of all its splits"
    )

    @model_validator(mode="after")
    def _not_empty(self) -> "DrawnDataConfig":
        used = ("cord_v2",) if self.layout == "cord_v2" else SUBSETS
        if not any(self.counts()[subset] for subset in used):
            names = ", ".join(f"num_{subset}" for subset in used)
            raise ValueError(f"nothing is drawn: {names} is 0; try num_cord_v2=10")
        return self

    def counts(self) -> dict[str, int]:
        """Rows of each subset."""
        return {subset: getattr(self, f"num_{subset}") for subset in SUBSETS}


def _run(config: DrawnDataConfig, inputs: Mapping[str, object], work: Path, resources: object) -> StageOutput:
    write = _write_cord if config.layout == "cord_v2" else _write_suite
    shown = write(config, work)
    write_raw_report(work, shown, "Drawn pictures as raw rows")
    return StageOutput(stats={"rows": {subset: len(rows) for subset, rows in shown.items()}})


def _write_suite(config: DrawnDataConfig, work: Path) -> dict[str, list[Row]]:
    subsets: dict[str, list[Row]] = {}
    for subset, row in iter_suite_rows(config.seed, config.counts()):
        subsets.setdefault(subset, []).append(row)
    for subset, rows in subsets.items():
        write_subset(work / subset, rows, ROW_SCHEMA)
    return subsets


def _write_cord(config: DrawnDataConfig, work: Path) -> dict[str, list[Row]]:
    """Returns rows for the report."""
    splits: dict[str, list[CordRow]] = {}
    for split, row in iter_cord_splits(config.seed, config.num_cord_v2):
        splits.setdefault(split, []).append(row)
    for split, rows in splits.items():
        write_subset(work / "data", rows, CORD_SCHEMA, split)
    return {split: [_shown(row, split) for row in rows] for split, rows in splits.items()}


def _shown(row: CordRow, split: str) -> Row:
    parse = json.dumps(json.loads(str(row["ground_truth"]))["gt_parse"])
    return {"images": [row["image"]], "texts": [{"user": "", "assistant": parse, "source": split}]}


STAGE = Stage("drawn_data", VERSION, _run, on_disk=True)
