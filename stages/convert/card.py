"""The text of a convert artifact's `dataset_card.md`."""

from collections.abc import Iterator, Mapping

import numpy as np
import yaml

from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import SPLITS
from stages.artifacts.quarantine import QUARANTINE
from stages.convert.figures import LENGTHS, quantiles, value_counts
from stages.convert.report import SUBSET_COLUMNS, Converted, conversation, reason_rows, subset_rows
from stages.pages.dataset_card import SplitSize, card_head
from stages.pages.page import render

_EXAMPLES = 6


def convert_card(name: str, config: Mapping[str, object], converted: Converted, shards: list[ShardEntry]) -> str:
    """Return the card, Markdown with the hub's YAML head; `config` has the fields of convert's config."""
    sizes = {split: _size([s for s in shards if s.split == split]) for split in SPLITS}
    pictures = np.bincount(converted.plan.splits[converted.pictures["row"].to_numpy()], minlength=len(SPLITS)).tolist()
    figures, examples = converted.figures, converted.examples[:_EXAMPLES]
    letters = max(1, sum(figures.scripts.values()))
    return render(
        "dataset_card.md.j2",
        name=name,
        head=card_head(name, sizes, has_pictures=len(converted.pictures) > 0),
        splits=[
            [s, sizes[s].num_samples, sizes[s].num_shards, sizes[s].num_bytes, n] for s, n in zip(SPLITS, pictures)
        ],
        subset_columns=SUBSET_COLUMNS,
        subsets=subset_rows(figures),
        num_pictures=len(converted.pictures),
        picture_kinds=list(_picture_kinds(converted)),
        picture_sides=list(_picture_sides(converted)),
        turns=figures.turns,
        lengths=list(_lengths(converted)),
        scripts=[[script, number, round(number / letters, 4)] for script, number in figures.scripts.items()],
        answers=[[text, times, round(times / max(1, figures.turns), 4)] for text, times in figures.answers],
        source_rows=converted.source_rows,
        num_rows=converted.num_rows,
        seen=len(converted.scan),
        kept=int(converted.plan.kept.sum()),
        quarantine=QUARANTINE,
        reasons=reason_rows(converted.plan),
        examples="\n\n".join(f"{s.key} (pictures: {len(s.images)})\n{conversation(s)}" for s in examples),
        config=yaml.safe_dump(dict(config), sort_keys=True).strip(),
    )


def _size(shards: list[ShardEntry]) -> SplitSize:
    return SplitSize(sum(s.num_samples for s in shards), sum(s.size_bytes for s in shards), len(shards))


def _picture_kinds(converted: Converted) -> Iterator[list[object]]:
    for title, column in (("file format", "format"), ("pixel format", "mode")):
        counts = value_counts(converted.pictures[column])
        yield from ([title, kind, counts[kind]] for kind in sorted(counts, key=lambda kind: -counts[kind]))


def _picture_sides(converted: Converted) -> Iterator[list[object]]:
    widths, heights = converted.pictures["width"].to_numpy(), converted.pictures["height"].to_numpy()
    named = {"width": widths, "height": heights, "megapixels": widths.astype(np.int64) * heights / 1e6}
    for name, values in named.items() if len(widths) else ():
        median, p95 = np.percentile(values, [50, 95], method="nearest")
        yield [name, *(round(value.item(), 3) for value in (values.min(), median, p95, values.max()))]


def _lengths(converted: Converted) -> Iterator[list[object]]:
    named = {name: quantiles(converted.figures.lengths[name]) for name in LENGTHS}
    named["turns of a sample"] = quantiles(converted.figures.turns_per_sample)
    return ([name.replace("_", " "), *values.values()] for name, values in named.items() if values)
