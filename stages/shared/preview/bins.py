"""Bins on a page: each is a bar of segments, one per sample in the colour of its subset; padding is hatched."""

from collections.abc import Iterator, Mapping

from markupsafe import Markup

from dataset_builders.contracts.bins import Bin, BinPlan, read_bins
from dataset_builders.contracts.sample import SPLITS, subset_of
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath
from stages.shared.artifacts.artifact import Artifact
from stages.shared.pages.page import counted, render_part
from stages.shared.preview.samples import evenly

_TRAIN_PER_HELDOUT = 4  # number of train bars per heldout bar
_ROUGHLY_RIGHT = 0.45  # a segment that starts to the right of this share has its text on its left
# Neighbouring colours differ in hue, saturation and lightness; with more subsets than colours, the colours repeat.
_COLOURS = (
    *("#4e79c4", "#e08a3c", "#4da06b", "#b95fb0", "#c9a227", "#3ba3b5"),
    *("#d0605e", "#7a6bc8", "#8aa33a", "#a97450", "#5f86a3", "#d884a8"),
)


def bins_html(plan: Artifact, count: int, key: str | None = None) -> Markup:
    """Return bars of some bins of each split, with a navigation bar.

    Raises:
        InputError: no bin holds `key`.
    """
    plans = {split: read_bins(plan.dir, split) for split in SPLITS}
    shown = _bins_of_key(plans, key, plan.dir) if key else _choose(plans, count)
    subsets = sorted({subset_of(ref.key) for _, _, refs in shown for ref in refs})
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(subsets)}
    limits = {name: plan.manifest.stats[name] for name in ("seq_len", "max_patches", "max_images")}
    return render_part(
        "bins.html.j2",
        title=f"{len(shown)} of {sum(map(len, plans.values())):,} bins: tokens above, patches below",
        splits=[split for split in SPLITS if any(split == of for of, _, _ in shown)],
        colours=colours,
        bins=[_bin(split, number, refs, limits, colours) for split, number, refs in shown],
    )


def _choose(plans: Mapping[str, BinPlan], count: int) -> list[tuple[str, int, Bin]]:
    counts = {"train": count, "heldout": max(1, count // _TRAIN_PER_HELDOUT)}
    return [
        (split, number, plan[number])
        for split, plan in plans.items()
        for number in evenly(range(len(plan)), counts[split])
    ]


def _bins_of_key(plans: Mapping[str, BinPlan], key: str, directory: StorePath) -> list[tuple[str, int, Bin]]:
    for split, plan in plans.items():
        of_key = [(split, number, refs) for number, refs in enumerate(plan) if any(ref.key == key for ref in refs)]
        if of_key:
            return of_key
    raise InputError(f"--key {key}: no bin of {directory} holds it; leave --key out to see some that are there")


def _bin(
    split: str, number: int, refs: Bin, limits: Mapping[str, int | None], colours: Mapping[str, str]
) -> dict[str, object]:
    """Return the values of bins.html.j2 for one bin."""
    strips = [("num_tokens", limits["seq_len"]), ("num_patches", limits["max_patches"])]
    return {
        "split": split,
        "number": number,
        "samples": len(refs),
        "tokens": sum(ref.num_tokens for ref in refs),
        "patches": sum(ref.num_patches for ref in refs),
        "images": sum(ref.num_images for ref in refs),
        **limits,
        "strips": [list(_segments(refs, name, room, colours)) for name, room in strips],
    }


def _segments(refs: Bin, name: str, room: int, colours: Mapping[str, str]) -> Iterator[dict[str, object]]:
    start = 0
    for ref in refs:
        size = getattr(ref, name)
        if size:
            tip = f"{ref.key}\n{ref.num_tokens:,} tokens, {ref.num_loss_tokens:,} learnt"
            if ref.num_images:
                tip += f"\n{ref.num_patches:,} patches, {counted(ref.num_images, 'image')}"
            colour, is_right = colours[subset_of(ref.key)], start > _ROUGHLY_RIGHT * room
            yield {"percent": 100 * size / room, "colour": colour, "is_right": is_right, "tip": tip}
        start += size
