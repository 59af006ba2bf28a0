"""The report of convert, its figures for the manifest, and the list of rows that it left out.

The figures are gathered over the kept samples part by part: memory grows only with distinct values.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataset_builders.contracts.manifest import SubsetOrigin
from dataset_builders.contracts.sample import SKIP_REASONS, SPLITS
from dataset_builders.readers.parts import Part
from dataset_builders.storage.store import StorePath
from stages.convert.plan import LEFT_OUT, REASONS, Plan
from stages.convert.scan import Scan, scan_path
from stages.shared.artifacts.left_out import LeftOut, left_out_table
from stages.shared.artifacts.row_tables import read_columns
from stages.shared.pages.report import Histogram, Section, Table, write_report

_SHOWN_SKIPS = 100
_ROWS_AT_A_TIME = 1 << 16
_LENGTHS = ("question_chars", "answer_chars")
_BUCKET_BITS = 18
_CANDIDATE_BUCKETS = 2000
_FREQUENT = 20


@dataclass(slots=True)
class SubsetFigures:
    """Figures of one subset: by split, samples and bytes in shards; image uses, turns, and samples left out."""

    samples: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    pictures: int = 0
    turns: int = 0
    left_out: int = 0


@dataclass(slots=True)
class Figures:
    """Figures of the kept samples."""

    subsets: dict[str, SubsetFigures] = field(default_factory=dict)  # by name, in order of the source
    # One of _LENGTHS -> length -> number of messages of that length.
    lengths: dict[str, Counter[int]] = field(default_factory=lambda: {name: Counter() for name in _LENGTHS})
    turns_per_sample: Counter[int] = field(default_factory=Counter)  # number of turns -> number of samples
    scripts: dict[str, int] = field(default_factory=dict)  # Unicode's name of a script -> letters, most frequent first
    answers: list[tuple[str, int]] = field(default_factory=list)  # (first 60 characters, times), most frequent first
    with_boxes: int = 0  # samples with places for boxes
    with_empty_lists: int = 0  # of these, samples in whose places there is no box
    labels: Counter[str] = field(default_factory=Counter)  # label of a box -> number of boxes
    # Of each use of a video: its frames, and the seconds from the first to the last, rounded up.
    video_frames: Counter[int] = field(default_factory=Counter)
    video_seconds: Counter[int] = field(default_factory=Counter)
    videos_with_audio: int = 0
    frame_lists: int = 0  # videos that are lists of frames

    @property
    def turns(self) -> int:
        return sum(subset.turns for subset in self.subsets.values())


@dataclass(frozen=True, slots=True)
class Converted:
    """The data for the report and the manifest's figures.

    Attributes:
        source_rows: number of raw rows in the source.
        num_rows: number of raw rows read.
        pictures: the table of `distinct_pictures`.
        parts: number of a part -> the part.
        origins: subset -> its origin.
        not_read: what the builders leave out within rows, in words -> how often (see Builder.not_read).
    """

    source_rows: int
    num_rows: int
    scan: Scan
    plan: Plan
    figures: Figures
    pictures: pa.Table
    parts: Mapping[int, Part]
    origins: Mapping[str, SubsetOrigin]
    not_read: Mapping[str, int]


def iter_left_out(scan: Scan, plan: Plan, parts: Mapping[int, Part]) -> Iterator[LeftOut]:
    """Yield each row left out, in order, with its file and its row in that file, from 0."""
    left_out = np.flatnonzero(~plan.kept)
    for begin in range(0, len(left_out), _ROWS_AT_A_TIME):
        rows = left_out[begin : begin + _ROWS_AT_A_TIME]
        keys, details = (scan.table[name].take(pa.array(rows)).to_pylist() for name in ("key", "detail"))
        first_keys = scan.table["key"].take(pa.array(plan.firsts[rows])).to_pylist()
        for row, number, key, detail, first_key in zip(rows, scan.part_of(rows), keys, details, first_keys):
            part = parts[int(number)]
            if plan.firsts[row] != row:
                detail = f"the same images, videos and messages as {first_key}"
            yield LeftOut(key, REASONS[plan.reasons[row]], detail, *part.place(key))


def convert_stats(converted: Converted) -> dict[str, object]:
    """Return the manifest's figures: counts by subset and split; formats, modes and sides of distinct images."""
    figures, pictures = converted.figures, converted.pictures
    splits = converted.plan.splits[pictures["row"].to_numpy()]
    sides = {}
    if len(pictures):
        widths, heights = pictures["width"].to_numpy(), pictures["height"].to_numpy()
        shorter, longer = np.minimum(widths, heights), np.maximum(widths, heights)
        sides = {"shortest": int(shorter.min()), "median": int(np.median(longer)), "longest": int(longer.max())}
    return {
        **({"source_rows": converted.source_rows} if converted.source_rows > converted.num_rows else {}),
        "raw_rows": converted.num_rows,
        "seen": len(converted.scan),
        "samples": {name: dict(subset.samples) for name, subset in figures.subsets.items()},
        "origins": {name: origin.model_dump() for name, origin in converted.origins.items()},
        "turns": figures.turns,
        "pictures": {split: int((splits == place).sum()) for place, split in enumerate(SPLITS)},
        "picture_formats": dict(sorted(value_counts(pictures["format"]).items())),
        "picture_modes": dict(sorted(value_counts(pictures["mode"].drop_null()).items())),
        "pictures_rotated_by_exif": int(pc.sum(pictures["rotated"]).as_py() or 0),
        "picture_sides": sides,
        "scripts": figures.scripts,
        **({"boxes": _box_counts(figures)} if figures.with_boxes else {}),
        **({"videos": _video_counts(figures)} if figures.video_frames else {}),
        **({"not_read": dict(converted.not_read)} if converted.not_read else {}),
    }


def _box_counts(figures: Figures) -> dict[str, int]:
    return {
        "samples": figures.with_boxes,
        "samples_without_a_box": figures.with_empty_lists,
        "boxes": figures.labels.total(),
        "labels": len(figures.labels.keys() - {""}),
    }


def _video_counts(figures: Figures) -> dict[str, int]:
    return {
        "shown": figures.video_frames.total(),
        "frames": sum(frames * number for frames, number in figures.video_frames.items()),
        "lists_of_frames": figures.frame_lists,
        "with_audio_that_is_not_read": figures.videos_with_audio,
    }


def write_convert_report(directory: StorePath, converted: Converted, stats: Mapping[str, object]) -> None:
    """Write report.json of a convert artifact. A histogram of image sides has one count for each use of an image; MB
    are 10^6 bytes in shards."""
    plan, figures = converted.plan, converted.figures
    left_out = list(islice(iter_left_out(converted.scan, plan, converted.parts), _SHOWN_SKIPS))
    num_left_out = int((~plan.kept).sum())
    kept = converted.scan.table.filter(pa.array(plan.kept))
    uses = pc.list_flatten(kept["pictures"])
    per_sample = pc.list_value_length(kept["pictures"]).to_numpy()
    columns = ("subset", *SPLITS, "left out", "pictures shown", "turns", *(f"MB {split}" for split in SPLITS))
    subsets = [
        [name, *s.samples.values(), s.left_out, s.pictures, s.turns, *(round(n / 1e6, 2) for n in s.bytes.values())]
        for name, s in figures.subsets.items()
    ]
    letters = sum(figures.scripts.values())
    answers = [[text, count, count / max(1, figures.turns)] for text, count in figures.answers]
    boxes = [[text or "no label", n, n / figures.labels.total()] for text, n in figures.labels.most_common(_FREQUENT)]
    reasons = [[reason, number, SKIP_REASONS[reason]] for reason, number in Counter(plan.skips()).most_common()]
    sections: list[Section] = [
        Histogram("Picture widths", pc.struct_field(uses, "width").to_numpy(), "pixels, one count a use"),
        Histogram("Picture heights", pc.struct_field(uses, "height").to_numpy(), "pixels, one count a use"),
        Histogram("Pictures of a sample", per_sample, "pictures"),
        *(
            [
                Histogram("Frames of a video", spread(figures.video_frames), "frames between its start and its end"),
                Histogram("Length of a video", spread(figures.video_seconds), "seconds, rounded up"),
            ]
            if figures.video_frames
            else []
        ),
        Histogram("Turns of a sample", spread(figures.turns_per_sample), "turns"),
        Histogram("Length of a question", spread(figures.lengths["question_chars"]), "characters"),
        Histogram("Length of an answer", spread(figures.lengths["answer_chars"]), "characters"),
        Histogram("Size of a sample", kept["size"].to_numpy() / 1000, "kB in a shard"),
        Table("Subsets", columns, subsets),
        Table("Scripts", ["script", "letters", "share"], [[s, n, n / letters] for s, n in figures.scripts.items()]),
        Table("Most frequent answers", ["answer", "times", "share of answers"], answers),
        *([Table("Boxes", ["label", "boxes", "share"], boxes)] if figures.with_boxes else []),
        Table("Left out, by reason", ["reason", "samples", "meaning"], reasons),
        left_out_table(left_out, num_left_out),
    ]
    summary = {
        **({"rows of the source": stats["source_rows"]} if "source_rows" in stats else {}),
        "raw rows": converted.num_rows,
        "samples made of them": len(converted.scan),
        "samples": int(plan.kept.sum()),
        "left out": num_left_out,
        "splits": {split: int((plan.splits == place).sum()) for place, split in enumerate(SPLITS)},
        "distinct pictures": stats["pictures"],
        "picture formats": stats["picture_formats"],
        "pixel formats": stats["picture_modes"],
        **{name.replace("_", " "): stats[name] for name in ("boxes", "videos", "not_read") if name in stats},
    }
    write_report(directory, title="Samples", summary=summary, sections=sections)


def gather_figures(work: StorePath, scan: Scan, plan: Plan, parts: Mapping[int, Part]) -> Figures:
    """Compute the figures of a plan, from the scans below `work`."""
    figures = Figures()
    scripts: Counter[str] = Counter()
    buckets = np.zeros(1 << _BUCKET_BITS, np.int64)
    for number, part in parts.items():
        subset = figures.subsets.setdefault(part.subset, SubsetFigures())
        splits = plan.splits[scan.starts[number] : scan.starts[number + 1]]
        columns = (
            *_LENGTHS,
            "size",
            "pictures",
            "answer_hashes",
            "scripts",
            "letters",
            "box_places",
            "labels",
            "videos",
        )
        table = read_columns(scan_path(work, number), columns)
        sizes = table["size"].fill_null(0).to_numpy()
        for place, split in enumerate(SPLITS):
            subset.samples[split] += int((splits == place).sum())
            subset.bytes[split] += int(sizes[splits == place].sum())
        subset.left_out += int((splits == LEFT_OUT).sum())
        uses = pc.list_value_length(table["pictures"]).fill_null(0).to_numpy()
        subset.pictures += int(uses[splits != LEFT_OUT].sum())
        table = table.filter(pa.array(splits != LEFT_OUT))
        subset.turns += len(_flat(table, "answer_chars"))
        figures.turns_per_sample.update(value_counts(pc.list_value_length(table["answer_chars"])))
        for name, counter in figures.lengths.items():
            counter.update(value_counts(pc.list_flatten(table[name])))
        for script, letters in zip(pc.list_flatten(table["scripts"]).to_pylist(), _flat(table, "letters").tolist()):
            scripts[script] += letters
        has_places = table["box_places"].to_numpy() > 0
        figures.with_boxes += int(has_places.sum())
        figures.with_empty_lists += int((has_places & (pc.list_value_length(table["labels"]).to_numpy() == 0)).sum())
        figures.labels.update(value_counts(pc.list_flatten(table["labels"])))
        for video in pc.list_flatten(table["videos"]).to_pylist():
            figures.video_frames[video["frames"]] += 1
            figures.video_seconds[math.ceil(video["seconds"])] += 1
            figures.videos_with_audio += video["has_audio"]
            figures.frame_lists += not video["is_file"]
        np.add.at(buckets, _bucket(_flat(table, "answer_hashes")), 1)
    figures.scripts = dict(sorted(scripts.items(), key=lambda item: (-item[1], item[0])))
    figures.answers = _frequent_answers(work, scan, plan, list(parts), buckets)
    return figures


def _frequent_answers(
    work: StorePath, scan: Scan, plan: Plan, parts: Sequence[int], buckets: np.ndarray
) -> list[tuple[str, int]]:
    """Return the most frequent answers. `buckets` is (2^18,): the number of answers by the top bits of their hash."""
    # In bounded memory: only the answers in the fullest buckets are counted one by one, because any other answer occurs
    # at most as often as its whole bucket.
    order = np.argsort(-buckets, kind="stable")[:_CANDIDATE_BUCKETS]
    is_candidate = np.zeros(len(buckets), bool)
    is_candidate[order] = buckets[order] > 0
    counts: Counter[str] = Counter()
    for number in parts:
        table = read_columns(scan_path(work, number), ("answers", "answer_hashes"))
        table = table.filter(pa.array(plan.kept[scan.starts[number] : scan.starts[number + 1]]))
        chosen = pa.array(is_candidate[_bucket(_flat(table, "answer_hashes"))])
        counts.update(value_counts(pc.list_flatten(table["answers"]).filter(chosen)))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_FREQUENT]


def _bucket(hashes: np.ndarray) -> np.ndarray:
    return (hashes.astype(np.uint64) >> np.uint64(64 - _BUCKET_BITS)).astype(np.int64)


def _flat(table: pa.Table, name: str) -> np.ndarray:
    return pc.list_flatten(table[name]).to_numpy()


def spread(counts: Mapping[int, int]) -> np.ndarray:
    """Return (n,) int32 with each value repeated by its count, for a histogram."""
    values = sorted(counts)
    return np.repeat(np.array(values, np.int32), np.array([counts[value] for value in values], np.int64))


def value_counts(values: pa.ChunkedArray) -> dict[Any, int]:
    """Return value -> number of occurrences, in order of appearance."""
    return {count["values"]: count["counts"] for count in values.value_counts().to_pylist()}
