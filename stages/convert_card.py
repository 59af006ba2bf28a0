"""The dataset card of a convert artifact: what `dataset_card.md` says before anything was tokenized."""

from collections.abc import Mapping

import numpy as np
import yaml

from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import SPLITS
from stages.convert_figures import LENGTHS, quantiles
from stages.convert_report import SUBSET_COLUMNS, Converted, conversation, reason_rows, subset_rows
from stages.dataset_card import SplitSize, block, card_head, section, table
from stages.quarantine import QUARANTINE

_EXAMPLES = 6
_ABOUT = """Sample shards made by athanor: WebDataset tars, in which a sample is `key.json` (its messages; name and
SHA-256 of each image; its own digest) and the original bytes of its images, `key.0.jpg`, `key.1.png`, ...

No picture is in two splits, nor are two samples that share a picture, also through others. `pictures.parquet` has the
SHA-256 of every distinct picture. `report.html` shows examples with their pictures."""
_READ = """```python
import webdataset as wds

for sample in wds.WebDataset("train/shard-00000.tar", shardshuffle=False):
    print(sample["__key__"], sample["json"])
```"""


def convert_card(name: str, config: Mapping[str, object], done: Converted, shards: list[ShardEntry]) -> str:
    """The whole card, Markdown with the hub's YAML head.

    Args:
        name: what people call the dataset.
        config: how it was converted.
    """
    sizes = {split: _size([s for s in shards if s.split == split]) for split in SPLITS}
    pictures = done.plan.splits[done.pictures["row"].to_numpy()]
    splits = [
        [split, sizes[split].num_samples, sizes[split].num_shards, sizes[split].num_bytes, int((pictures == i).sum())]
        for i, split in enumerate(SPLITS)
    ]
    columns = ["split", "samples", "shards", "bytes", "distinct pictures"]
    subsets = table(SUBSET_COLUMNS, subset_rows(done.figures))
    parts = [
        card_head(name, sizes, has_pictures=len(done.pictures) > 0),
        f"\n# {name}\n\n{_ABOUT}\n",
        section("Splits", table(columns, splits)),
        section("Subsets", f"MB are 10^6 bytes in shards.\n\n{subsets}"),
        section("Pictures", _pictures(done)),
        section("Text", _text(done)),
        section("Left out", _left_out(done)),
        section("Examples", _examples(done)),
        section("How it was made", f"```yaml\n{yaml.safe_dump(dict(config), sort_keys=True).strip()}\n```"),
        section("How to read it", _READ),
    ]
    return "".join(parts)


def _size(shards: list[ShardEntry]) -> SplitSize:
    return SplitSize(sum(s.num_samples for s in shards), sum(s.size_bytes for s in shards), len(shards))


def _pictures(done: Converted) -> str:
    if not len(done.pictures):
        return "None."
    formats, modes = (done.pictures[name].value_counts().to_pylist() for name in ("format", "mode"))
    kinds = [["file format", c["values"], c["counts"]] for c in sorted(formats, key=lambda c: -c["counts"])]
    kinds += [["pixel format", c["values"], c["counts"]] for c in sorted(modes, key=lambda c: -c["counts"])]
    widths, heights = done.pictures["width"].to_numpy(), done.pictures["height"].to_numpy()
    sides = [_side_row("width", widths), _side_row("height", heights)]
    sides += [_side_row("megapixels", widths.astype(np.int64) * heights / 1e6)]
    return (
        f"{len(done.pictures):,} distinct ones.\n\n{table(['', 'kind', 'pictures'], kinds)}\n\n"
        f"{table(['', 'least', 'median', '95th percentile', 'most'], sides)}"
    )


def _side_row(name: str, values: np.ndarray) -> list[object]:
    median, p95 = np.percentile(values, [50, 95], method="nearest")
    return [name, *(round(value.item(), 3) for value in (values.min(), median, p95, values.max()))]


def _text(done: Converted) -> str:
    figures = done.figures
    named = {name: quantiles(figures.lengths[name]) for name in LENGTHS}
    named["turns of a sample"] = quantiles(figures.turns_a_sample)
    rows = [[name.replace("_", " "), *values.values()] for name, values in named.items() if values]
    letters = max(1, sum(figures.scripts.values()))
    scripts = [[name, number, round(number / letters, 4)] for name, number in figures.scripts.items()]
    answers = [[text, times, round(times / max(1, figures.turns), 4)] for text, times in figures.answers]
    return "\n\n".join(
        [
            f"{figures.turns:,} turns. Lengths are in characters and in words (runs between white space):",
            table(["", "least", "median", "mean", "95th percentile", "most"], rows),
            "Scripts, by letters:",
            table(["script", "letters", "share"], scripts),
            "The most frequent answers:",
            table(["answer", "times", "share of answers"], answers),
        ]
    )


def _left_out(done: Converted) -> str:
    seen, kept = len(done.scan), int(done.plan.kept.sum())
    text = (
        f"{done.num_rows:,} raw rows gave {seen:,} samples: {kept:,} are here, left out: "
        f"{seen - kept:,}, each with its reason and where it came from in `{QUARANTINE}`."
    )
    return f"{text}\n\n{table(['reason', 'samples', 'meaning'], reason_rows(done.plan))}"


def _examples(done: Converted) -> str:
    texts = [f"{s.key} (pictures: {len(s.images)})\n{conversation(s)}" for s in done.examples[:_EXAMPLES]]
    return block("\n\n".join(texts))
