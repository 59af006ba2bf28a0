"""Bins of a preview: each a bar, its samples segments in the colour of their subset, its padding hatched."""

import html
from collections.abc import Iterator, Mapping

from dataset_builders.contracts.bins import Bin, BinPlan, SampleRef, read_bins
from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.store import StorePath
from stages.artifact import Artifact
from stages.preview_page import walk_bar
from stages.preview_samples import counted, evenly

_FULL_BARS = 4  # heldout shows a quarter of what train shows
_ROUGHLY_RIGHT = 0.45  # a segment that starts right of here has its words to its left
# Hue, saturation, lightness of neighbours differ; with more subsets than colours they come again.
_COLOURS = (
    *("#4e79c4", "#e08a3c", "#4da06b", "#b95fb0", "#c9a227", "#3ba3b5"),
    *("#d0605e", "#7a6bc8", "#8aa33a", "#a97450", "#5f86a3", "#d884a8"),
)


def bins_html(plan: Artifact, count: int, key: str | None = None) -> str:
    """Bars of some bins of each split under a bar to walk through them.

    Raises:
        InputError: no bin holds `key`.
    """
    plans = {split: read_bins(plan.dir, split) for split in SPLITS}
    shown = _bins_of_key(plans, key, plan.dir) if key else _choose(plans, count)
    subsets = sorted({_subset(ref) for _, _, refs in shown for ref in refs})
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(subsets)}
    limits = plan.manifest.stats
    bars = "".join(_bin_html(split, number, refs, limits, colours) for split, number, refs in shown)
    title = f"{len(shown)} of {sum(map(len, plans.values())):,} bins: tokens above, patches below"
    splits = [split for split in SPLITS if any(split == of for of, _, _ in shown)]
    return (
        f'{walk_bar(splits, "split")}<main>\n<section class="wide"><h2>{title}</h2>\n'
        f"{_legend(colours)}{bars}</section>\n</main>\n"
    )


def _choose(plans: Mapping[str, BinPlan], count: int) -> list[tuple[str, int, Bin]]:
    wanted = {"train": count, "heldout": max(1, count // _FULL_BARS)}
    return [
        (split, number, plan[number])
        for split, plan in plans.items()
        for number in evenly(range(len(plan)), wanted[split])
    ]


def _bins_of_key(plans: Mapping[str, BinPlan], key: str, directory: StorePath) -> list[tuple[str, int, Bin]]:
    for split, plan in plans.items():
        found = [(split, number, refs) for number, refs in enumerate(plan) if any(ref.key == key for ref in refs)]
        if found:
            return found
    raise InputError(f"--key {key}: no bin of {directory} holds it; leave --key out and see some that are there")


def _bin_html(split: str, number: int, refs: Bin, limits: Mapping[str, int | None], colours: Mapping[str, str]) -> str:
    tokens, patches = (sum(getattr(ref, name) for ref in refs) for name in ("num_tokens", "num_patches"))
    images = sum(ref.num_images for ref in refs)
    seq_len, max_patches, max_images = (limits[name] for name in ("seq_len", "max_patches", "max_images"))
    of_images = "" if max_images is None else f" of {max_images:,}"
    return (
        f'<div class="bin card" data-group="{split}"><p><b>{split} {number:,}</b> \u00b7 '
        f"{counted(len(refs), 'sample')} \u00b7 {tokens:,} of {seq_len:,} tokens (<b>{tokens / seq_len:.1%}</b>), "
        f"{patches:,} of {max_patches:,} patches ({patches / max_patches:.1%}) \u00b7 {images}{of_images} images</p>\n"
        f'<div class="strip">{"".join(_segments(refs, "num_tokens", seq_len, colours))}</div>\n'
        f'<div class="strip thin">{"".join(_segments(refs, "num_patches", max_patches, colours))}</div></div>\n'
    )


def _segments(refs: Bin, name: str, room: int, colours: Mapping[str, str]) -> Iterator[str]:
    start = 0
    for ref in refs:
        size = getattr(ref, name)
        if size:
            right = ' class="right"' if start > _ROUGHLY_RIGHT * room else ""
            words = html.escape(f"{ref.key}\n{ref.num_tokens:,} tokens, {ref.num_loss_tokens:,} learnt")
            pictures = f"\n{ref.num_patches:,} patches, {counted(ref.num_images, 'image')}" if ref.num_images else ""
            yield (
                f'<span{right} style="width:{100 * size / room:.3f}%;background:{colours[_subset(ref)]}" '
                f'data-t="{words}{pictures}"></span>'
            )
        start += size


def _subset(ref: SampleRef) -> str:
    return ref.key.partition("/")[0]


def _legend(colours: Mapping[str, str]) -> str:
    named = [f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in colours.items()]
    return (
        f'<div class="legend">{"".join(named)}<span><i class="pad"></i>padding, or room for more patches</span></div>\n'
    )
