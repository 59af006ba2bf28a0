"""convert: raw rows -> sample shards, with every row that is left out named in quarantine.jsonl.

    train/shard-00000.tar ...  heldout/shard-00000.tar ...   samples with their images' original bytes
    quarantine.jsonl                                         key, reason, detail, file, row; one a line
    pictures.parquet                                         SHA-256 of every distinct picture, and who shows it first
    dataset_card.md  report.json  report.html

Two passes over the source: the first decodes every image and keeps hashes (scan/, dropped at the end), the second
copies samples into shards. Both commit piece by piece, so that an interrupted run goes on where it was. Only the plan
between them holds something of every sample, some hundred bytes (convert_plan.py).
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_text
from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.store import StorePath, make_dir, remove_tree
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.images import PILLOW_PIXEL_LIMIT, ImageLimits
from dataset_builders.registry import get_builder
from stages.artifact import Input, Stage, StageOutput
from stages.convert_card import convert_card
from stages.convert_figures import gather_figures
from stages.convert_pictures import PICTURES, distinct_pictures, write_pictures
from stages.convert_plan import DUPLICATE, Plan, make_plan
from stages.convert_report import Converted, choose_examples, convert_stats, quarantined, write_convert_report
from stages.convert_scan import ScanTask, assert_parts_apart, scan_all, scan_path
from stages.convert_write import RawRows, write_all, write_tasks
from stages.dataset_card import DATASET_CARD
from stages.quarantine import QUARANTINE, write_quarantine
from stages.workers import StageResources

VERSION = 3  # 3: references of documents without the_cauldron's full stop

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
    decode_check: Literal["full", "header"] = Field(
        default="full",
        description="full: every image is decoded to its end; header: only its header is read, some five times faster, "
        "so that an image that is cut or damaged behind it is found by tokenization, which leaves the sample out",
    )
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
    config: ConvertConfig, inputs: Mapping[str, Input], work: StorePath, resources: StageResources | None
) -> StageOutput:
    source = inputs["raw"].dir
    rows, num_rows = _list_rows(config, source)
    resources = (resources or StageResources()).at_most(max(1, num_rows // _ROWS_A_WORKER))
    scan = scan_all(_scan_tasks(config, rows, work), resources)
    own_splits = [part.split for part in rows.parts.values()]
    plan = make_plan(scan, own_splits, config.seed, config.heldout_fraction, int(config.shard_size_mb * 1e6))
    num_left_out = write_quarantine(work, quarantined(scan, plan, rows.parts))
    _judge(config, plan, source, work / QUARANTINE)
    num_kept = int(plan.kept.sum())
    shards = write_all(write_tasks(work, scan, plan, rows), num_kept, num_rows, resources)
    written = sum(shard.num_samples for shard in shards)
    assert written == num_kept and written + num_left_out == len(scan), (written, num_kept, num_left_out, len(scan))
    done = Converted(
        num_rows=num_rows,
        scan=scan,
        plan=plan,
        figures=gather_figures(work, scan, plan, rows.parts),
        pictures=distinct_pictures(scan, plan),
        parts=rows.parts,
        examples=choose_examples(scan, plan, rows),
    )
    stats = _tell(config, work, done, shards)
    remove_tree(scan_path(work, 0).parent)
    return StageOutput(shards=shards, skips=plan.skips(), stats=stats)


def _list_rows(config: ConvertConfig, source: StorePath) -> tuple[RawRows, int]:
    """The source's parts, and the raw rows in them."""
    builder = get_builder(config.builder)
    options = builder.options.model_validate(config.options)
    parts = builder.list_parts(source, config.subsets, options)
    assert_parts_apart(parts)
    num_rows = sum(part.num_rows for part in parts)
    if not num_rows:
        raise InputError(f"the files below {source} hold no rows; give a source with some")
    return RawRows(builder=config.builder, options=options, parts=dict(enumerate(parts))), num_rows


def _scan_tasks(config: ConvertConfig, rows: RawRows, work: StorePath) -> list[ScanTask]:
    make_dir(scan_path(work, 0).parent)
    limits = ImageLimits(max_pixels=config.max_image_pixels, min_side=config.min_image_side)
    return [
        ScanTask(
            part=part,
            builder=rows.builder,
            options=rows.options,
            limits=limits,
            decode=config.decode_check == "full",
            out=scan_path(work, i),
        )
        for i, part in rows.parts.items()
    ]


def _tell(config: ConvertConfig, work: StorePath, done: Converted, shards: list[ShardEntry]) -> dict[str, object]:
    """Write everything beside the shards; returns the manifest's figures."""
    write_pictures(work / PICTURES, done.pictures, done.scan, done.plan)
    stats = convert_stats(done)
    write_convert_report(work, done, stats)
    name = f"{config.builder}: {', '.join(done.figures.subsets)}"
    write_text(work / DATASET_CARD, convert_card(name, config.model_dump(mode="json"), done, shards))
    return stats


def _judge(config: ConvertConfig, plan: Plan, source: StorePath, quarantine: StorePath) -> None:
    """Raise InputError when too little of the source is usable."""
    skips = Counter(plan.skips())
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
