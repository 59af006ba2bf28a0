"""What convert tells: figures for the manifest, the quarantine, and the report."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataset_builders.contracts.files import atomic_path
from dataset_builders.contracts.sample import IMAGE_SLOT, SKIP_REASONS, SPLITS, Sample
from dataset_builders.images import preview_png
from dataset_builders.parts import Part
from stages.convert_plan import Plan
from stages.convert_write import RawRows
from stages.quarantine import QUARANTINE
from stages.report import Histogram, Pictures, Section, Table, write_report

_SHOWN_SAMPLES = 24
_SHOWN_SKIPS = 100
_SHOWN_IMAGES = 4  # of one sample
_PREVIEW_SIDE = 200


def quarantined(scan: pa.Table, plan: Plan, parts: Mapping[int, Part]) -> Iterator[dict[str, object]]:
    """One mapping for each row left out, in order: key, reason, detail, file, row (in the file, from 0)."""
    for i in np.flatnonzero(np.not_equal(plan.reasons, None)):
        key, part = scan["key"][i].as_py(), parts[scan["part"][i].as_py()]
        yield {
            "key": key,
            "reason": plan.reasons[i],
            "detail": plan.details[i],
            "file": part.name,
            "row": part.row_in_file(key),
        }


def write_quarantine(path: Path, rows: Iterator[dict[str, object]]) -> None:
    """A JSON object a line."""
    with atomic_path(path) as tmp, tmp.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def convert_stats(scan: pa.Table, plan: Plan) -> dict[str, object]:
    """The manifest's figures: counts by subset and split; formats, modes and sides of distinct pictures."""
    subsets = [key.partition("/")[0] for key in scan["key"].to_pylist()]
    samples = {subset: dict.fromkeys(SPLITS, 0) for subset in dict.fromkeys(subsets)}
    for subset, split in zip(subsets, plan.splits):
        if split is not None:
            samples[subset][split] += 1
    kept = np.not_equal(plan.splits, None)
    pictures = _distinct_pictures(scan.filter(pa.array(kept)))
    return {
        "seen": len(scan),
        "samples": samples,
        "turns": int(_flat(scan, "answer_chars", kept).size),
        "pictures": {split: len(_distinct_pictures(scan.filter(pa.array(plan.splits == split)))) for split in SPLITS},
        "picture_formats": _counts(pictures, "formats"),
        "picture_modes": _counts(pictures, "modes"),
        "pictures_rotated_by_exif": int(pc.sum(pictures["rotated"]).as_py() or 0),
        "picture_sides": _sides(pictures),
    }


def _distinct_pictures(kept: pa.Table) -> pa.Table:
    """One row a distinct picture: images, widths, heights, formats, modes, rotated."""
    names = ["images", "widths", "heights", "formats", "modes", "rotated"]
    flat = pa.table({name: pc.list_flatten(kept[name]) for name in names})
    codes = flat["images"].combine_chunks().dictionary_encode().indices.to_numpy()
    return flat.take(pa.array(np.sort(np.unique(codes, return_index=True)[1])))


def _counts(pictures: pa.Table, name: str) -> dict[str, int]:
    return dict(sorted(Counter(pictures[name].to_pylist()).items()))


def _sides(pictures: pa.Table) -> dict[str, int]:
    if not len(pictures):
        return {}
    widths, heights = pictures["widths"].to_numpy(), pictures["heights"].to_numpy()
    shorter, longer = np.minimum(widths, heights), np.maximum(widths, heights)
    return {"shortest": int(shorter.min()), "median": int(np.median(longer)), "longest": int(longer.max())}


def _flat(scan: pa.Table, name: str, kept: np.ndarray) -> np.ndarray:
    return pc.list_flatten(scan[name].filter(pa.array(kept))).to_numpy()


def write_convert_report(
    directory: Path, scan: pa.Table, plan: Plan, rows: RawRows, stats: Mapping[str, object]
) -> None:
    """report.json and report.html of a convert artifact."""
    kept = np.not_equal(plan.splits, None)
    left_out = list(islice(quarantined(scan, plan, rows.parts), _SHOWN_SKIPS))
    pictures, texts = _examples(scan, plan, rows)
    sections: list[Section] = [
        Histogram("Picture widths", _flat(scan, "widths", kept), "pixels, one count a use"),
        Histogram("Picture heights", _flat(scan, "heights", kept), "pixels, one count a use"),
        Histogram("Pictures of a sample", _lengths(scan, "images", kept), "pictures"),
        Histogram("Turns of a sample", _lengths(scan, "answer_chars", kept), "turns"),
        Histogram("Length of an answer", _flat(scan, "answer_chars", kept), "characters"),
        Histogram("Size of a sample", scan["size"].filter(pa.array(kept)).to_numpy() / 1000, "kB in a shard"),
        Table("Subsets", ["subset", "train", "heldout", "left out"], _subset_rows(scan, plan, stats)),
        Table("Left out, by reason", ["reason", "samples", "meaning"], _reason_rows(plan)),
        Table(
            f"Left out, one by one; the first {_SHOWN_SKIPS} are here, all in {QUARANTINE}",
            ["key", "reason", "detail", "file", "row"],
            [list(row.values()) for row in left_out],
        ),
        Pictures("Samples", pictures),
        Table("Samples without a picture", ["key", "text"], texts),
    ]
    summary = {
        "samples": int(kept.sum()),
        "left out": int((~kept).sum()),
        "splits": {split: int((plan.splits == split).sum()) for split in SPLITS},
        "distinct pictures": stats["pictures"],
        "picture formats": stats["picture_formats"],
        "pixel formats": stats["picture_modes"],
    }
    write_report(directory, title="convert: raw rows to sample shards", summary=summary, sections=sections)


def _lengths(scan: pa.Table, name: str, kept: np.ndarray) -> np.ndarray:
    return pc.list_value_length(scan[name].filter(pa.array(kept))).to_numpy()


def _subset_rows(scan: pa.Table, plan: Plan, stats: Mapping[str, object]) -> list[list[object]]:
    skipped = Counter(
        key.partition("/")[0] for key, reason in zip(scan["key"].to_pylist(), plan.reasons) if reason is not None
    )
    return [[name, *counts.values(), skipped[name]] for name, counts in stats["samples"].items()]


def _reason_rows(plan: Plan) -> list[list[object]]:
    counts = Counter(reason for reason in plan.reasons if reason is not None)
    return [[reason, number, SKIP_REASONS[reason]] for reason, number in counts.most_common()]


def _examples(scan: pa.Table, plan: Plan, rows: RawRows) -> tuple[list[tuple[bytes, str]], list[tuple[str, str]]]:
    """Some train samples of every subset: pictures with captions, and (key, text) of those without a picture."""
    keys, parts, digests = (scan[name].to_pylist() for name in ("key", "part", "digest"))
    by_subset: dict[str, list[int]] = {}
    for i in np.flatnonzero(plan.splits == "train").tolist():
        by_subset.setdefault(keys[i].partition("/")[0], []).append(i)
    each = max(1, _SHOWN_SAMPLES // max(1, len(by_subset)))
    by_part: dict[int, list[str]] = {}
    for indices in by_subset.values():
        for i in sorted(sorted(indices, key=digests.__getitem__)[:each]):
            by_part.setdefault(parts[i], []).append(keys[i])
    pictures, texts = [], []
    for part, chosen in by_part.items():
        for sample in rows.read(part, chosen):
            if sample.images:
                pictures.append((preview_png(sample.images[:_SHOWN_IMAGES], _PREVIEW_SIDE), _caption(sample)))
            else:
                texts.append((sample.key, _conversation(sample)))
    return pictures, texts


def _caption(sample: Sample) -> str:
    more = len(sample.images) - _SHOWN_IMAGES
    return f"{sample.key}\n{_conversation(sample)}" + (f"\n({more} more pictures)" if more > 0 else "")


def _conversation(sample: Sample) -> str:
    """One line a turn: question, arrow, answer; cut where it gets long."""
    texts = [m.text.replace(IMAGE_SLOT, "").strip() for m in sample.messages]
    lines = [f"{question[:160]} \u2192 {answer[:160]}" for question, answer in zip(texts[::2], texts[1::2])]
    return "\n".join(lines[:6]) + ("\n..." if len(lines) > 6 else "")
