"""The report of convert, its figures for the manifest, and the list of rows that it left out."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataset_builders.contracts.sample import SKIP_REASONS, SPLITS
from dataset_builders.readers.parts import Part
from dataset_builders.storage.store import StorePath
from stages.convert.figures import Figures, spread, value_counts
from stages.convert.plan import REASONS, Plan
from stages.convert.scan import Scan
from stages.shared.artifacts.left_out import LeftOut, left_out_table
from stages.shared.pages.report import Histogram, Section, Table, write_report

_SHOWN_SKIPS = 100
_ROWS_AT_A_TIME = 1 << 16


@dataclass(frozen=True, slots=True)
class Converted:
    """The data for the report and the manifest's figures.

    Attributes:
        source_rows: number of raw rows in the source.
        num_rows: number of raw rows read.
        pictures: the table of `distinct_pictures`.
        parts: number of a part -> the part.
    """

    source_rows: int
    num_rows: int
    scan: Scan
    plan: Plan
    figures: Figures
    pictures: pa.Table
    parts: Mapping[int, Part]


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
                detail = f"the same images and messages as {first_key}"
            yield LeftOut(key, REASONS[plan.reasons[row]], detail, *part.place(key))


def convert_stats(converted: Converted) -> dict[str, object]:
    """Return the manifest's figures: counts by subset and split; formats, modes and sides of distinct images."""
    splits = converted.plan.splits[converted.pictures["row"].to_numpy()]
    return {
        **({"source_rows": converted.source_rows} if converted.source_rows > converted.num_rows else {}),
        "raw_rows": converted.num_rows,
        "seen": len(converted.scan),
        "samples": {name: dict(subset.samples) for name, subset in converted.figures.subsets.items()},
        "turns": converted.figures.turns,
        "pictures": {split: int((splits == place).sum()) for place, split in enumerate(SPLITS)},
        "picture_formats": dict(sorted(value_counts(converted.pictures["format"]).items())),
        "picture_modes": dict(sorted(value_counts(converted.pictures["mode"]).items())),
        "pictures_rotated_by_exif": int(pc.sum(converted.pictures["rotated"]).as_py() or 0),
        "picture_sides": _sides(converted.pictures),
        "scripts": converted.figures.scripts,
    }


def _sides(pictures: pa.Table) -> dict[str, int]:
    if not len(pictures):
        return {}
    widths, heights = pictures["width"].to_numpy(), pictures["height"].to_numpy()
    shorter, longer = np.minimum(widths, heights), np.maximum(widths, heights)
    return {"shortest": int(shorter.min()), "median": int(np.median(longer)), "longest": int(longer.max())}


def write_convert_report(directory: StorePath, converted: Converted, stats: Mapping[str, object]) -> None:
    """Write report.json of a convert artifact."""
    plan, figures = converted.plan, converted.figures
    left_out = list(islice(iter_left_out(converted.scan, plan, converted.parts), _SHOWN_SKIPS))
    num_left_out = int((~plan.kept).sum())
    reasons = [[reason, number, SKIP_REASONS[reason]] for reason, number in Counter(plan.skips()).most_common()]
    answers = [[text, count, count / max(1, figures.turns)] for text, count in figures.answers]
    letters = sum(figures.scripts.values())
    sections: list[Section] = [
        *_histograms(converted),
        Table("Subsets", _SUBSET_COLUMNS, _subset_rows(figures)),
        Table("Scripts", ["script", "letters", "share"], [[s, n, n / letters] for s, n in figures.scripts.items()]),
        Table("Most frequent answers", ["answer", "times", "share of answers"], answers),
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
    }
    write_report(directory, title="Samples", summary=summary, sections=sections)


def _histograms(converted: Converted) -> list[Histogram]:
    lengths, table = converted.figures.lengths, converted.scan.table.filter(pa.array(converted.plan.kept))
    uses = pc.list_flatten(table["pictures"])
    per_sample = pc.list_value_length(table["pictures"]).to_numpy()
    return [
        Histogram("Picture widths", pc.struct_field(uses, "width").to_numpy(), "pixels, one count a use"),
        Histogram("Picture heights", pc.struct_field(uses, "height").to_numpy(), "pixels, one count a use"),
        Histogram("Pictures of a sample", per_sample, "pictures"),
        Histogram("Turns of a sample", spread(converted.figures.turns_per_sample), "turns"),
        Histogram("Length of a question", spread(lengths["question_chars"]), "characters"),
        Histogram("Length of an answer", spread(lengths["answer_chars"]), "characters"),
        Histogram("Size of a sample", table["size"].to_numpy() / 1000, "kB in a shard"),
    ]


_SUBSET_COLUMNS = ("subset", *SPLITS, "left out", "pictures shown", "turns", *(f"MB {split}" for split in SPLITS))


def _subset_rows(figures: Figures) -> list[list[object]]:
    """Return one row of _SUBSET_COLUMNS per subset; MB are 10^6 bytes in shards."""
    return [
        [name, *s.samples.values(), s.left_out, s.pictures, s.turns, *(round(n / 1e6, 2) for n in s.bytes.values())]
        for name, s in figures.subsets.items()
    ]
