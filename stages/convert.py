"""convert: raw rows -> sample shards, with every row that is left out named in quarantine.jsonl.

    train/shard-00000.tar ...  heldout/shard-00000.tar ...   samples with their images' original bytes
    quarantine.jsonl                                         key, reason, detail, file, row; one a line
    report.json  report.html

Two passes over the source: the first decodes every image and keeps hashes (scan/, dropped at the end), the second
copies samples into shards. Both commit piece by piece, so that an interrupted run goes on where it was.
"""

import dataclasses
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.images import PILLOW_PIXEL_LIMIT, ImageLimits
from dataset_builders.registry import get_builder
from stages.artifact import Input, Stage, StageOutput
from stages.convert_plan import DUPLICATE, Plan, make_plan
from stages.convert_report import convert_stats, quarantined, write_convert_report, write_quarantine
from stages.convert_scan import ScanTask, scan_all
from stages.convert_write import RawRows, WriteTask, write_all
from stages.quarantine import QUARANTINE
from stages.workers import StageResources

VERSION = 1

_SCAN_DIR = "scan"
_JUDGED_FROM = 200  # samples seen before max_skip_fraction is held against them
_ROWS_A_WORKER = 2000  # about the seconds of work that the start of a process costs


class ConvertConfig(StrictModel):
    """What becomes of the raw rows."""

    builder: str = Field(description="which dataset's rows these are: a name in dataset_builders/registry.py")
    subsets: tuple[str, ...] = Field(description="subsets to read; none means all that the source holds")
    options: dict[str, Any] = Field(default={}, description="the builder's own settings; see its file")
    heldout_fraction: float = Field(ge=0, lt=1, description="share of pictures (with all their samples) held out")
    seed: int = Field(ge=0, description="decides which pictures are held out")
    max_image_pixels: int = Field(gt=0, le=PILLOW_PIXEL_LIMIT, description="an image with more pixels is left out")
    min_image_side: int = Field(ge=1, description="an image with a shorter side, in pixels, is left out")
    shard_size_mb: float = Field(
        gt=0, le=4096, description="a shard is closed before it grows over this, in 10^6 bytes"
    )
    max_skip_fraction: float = Field(
        ge=0,
        le=1,
        description="more left out than this share, exact duplicates aside, is an error; from 200 samples on",
    )

    @model_validator(mode="after")
    def _options_fit(self) -> "ConvertConfig":
        """Check the options against the builder's model and write out its defaults."""
        model = get_builder(self.builder).options
        try:
            whole = model.model_validate(self.options).model_dump(mode="json")
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(["options", *map(str, first["loc"])])
            known = ", ".join(model.model_fields) or "none"
            raise ValueError(f"{field} of builder {self.builder}: {first['msg']}; its options: {known}") from error
        object.__setattr__(self, "options", whole)
        return self


def _run(
    config: ConvertConfig, inputs: Mapping[str, Input], work: Path, resources: StageResources | None
) -> StageOutput:
    resources = resources or StageResources()
    source = inputs["raw"].dir
    builder = get_builder(config.builder)
    options = builder.options.model_validate(config.options)
    parts = builder.list_parts(source, config.subsets, options)
    num_rows = sum(part.num_rows for part in parts)
    if not num_rows:
        raise InputError(f"the parquet files below {source} hold no rows; give a source with some")
    workers = min(resources.num_workers, max(1, num_rows // _ROWS_A_WORKER))
    resources = dataclasses.replace(resources, num_workers=workers)
    rows = RawRows(builder=config.builder, options=options, parts=dict(enumerate(parts)))
    scan = scan_all(_scan_tasks(config, rows, work), resources)
    plan = make_plan(scan, config.seed, config.heldout_fraction, int(config.shard_size_mb * 1e6))
    write_quarantine(work / QUARANTINE, quarantined(scan, plan, rows.parts))
    _judge(config, plan, source, work / QUARANTINE)
    tasks = [WriteTask(work, shard, rows.only(shard.keys)) for shard in plan.shards]
    shards = write_all(tasks, num_rows, resources)
    stats = convert_stats(scan, plan)
    write_convert_report(work, scan, plan, rows, stats)
    shutil.rmtree(work / _SCAN_DIR)
    return StageOutput(shards=shards, skips=_skips(plan), stats=stats)


def _scan_tasks(config: ConvertConfig, rows: RawRows, work: Path) -> list[ScanTask]:
    directory = work / _SCAN_DIR
    directory.mkdir(exist_ok=True)
    limits = ImageLimits(max_pixels=config.max_image_pixels, min_side=config.min_image_side)
    return [
        ScanTask(
            part=part, builder=rows.builder, options=rows.options, limits=limits, out=directory / f"{i:06d}.parquet"
        )
        for i, part in rows.parts.items()
    ]


def _skips(plan: Plan) -> dict[str, int]:
    return dict(sorted(Counter(reason for reason in plan.reasons if reason is not None).items()))


def _judge(config: ConvertConfig, plan: Plan, source: Path, quarantine: Path) -> None:
    """Raise InputError when too little of the source is usable."""
    skips = Counter(_skips(plan))
    worst = ", ".join(f"{reason} ({number})" for reason, number in skips.most_common(3))
    seen = len(plan.reasons)
    if sum(skips.values()) == seen:
        raise InputError(f"no usable sample in {source}: {worst}; each is named in {quarantine}")
    bad = sum(skips.values()) - skips[DUPLICATE]
    if seen >= _JUDGED_FROM and bad > config.max_skip_fraction * seen:
        raise InputError(
            f"{bad} of {seen} samples of {source} are unusable, over max_skip_fraction={config.max_skip_fraction}: "
            f"{worst}; each is named in {quarantine}; mend the data or raise max_skip_fraction"
        )


STAGE = Stage("convert", VERSION, _run)
