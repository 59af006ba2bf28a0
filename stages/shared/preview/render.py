"""The contents of an artifact on its page, and a page of any artifact or shard on request.

    convert      images next to their conversations
    tokenize     every token, with trained tokens coloured, and the patches over each image
    plan_bins    bins as bars: a segment per sample in the colour of its subset; padding is hatched

The same artifact and options give the same bytes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from dataset_builders.contracts.bins import Bin, read_bins
from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.sample import SPLITS, subset_of
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, check_reachable, is_local, location, modified
from stages.shared.artifacts.artifact import Artifact, Input
from stages.shared.inputs.model_directory import ModelDirectory, opened_model
from stages.shared.pages.page import artifact_page, plain_page, render_part
from stages.shared.pages.shown_numbers import counted
from stages.shared.preview.samples import choose_samples, evenly, find_sample, samples_html, samples_of_shard
from stages.shared.preview.tokens import tokens_html

_STAGE_SAMPLES = 12
_OPENED_SHARDS = 8  # most shards to open, for a large dataset
_OPENED_REMOTE = 2  # most shards to open in a store while a user waits: a shard is downloaded completely
_FINGERPRINT = re.compile(r"[0-9a-f]{4,16}")
_MAX_FOLDERS_UP = 4  # most folders between a file of an artifact and its manifest
_TRAIN_PER_HELDOUT = 4  # number of train bars per heldout bar
_ROUGHLY_RIGHT = 0.45  # a segment that starts to the right of this share has its text on its left
# Neighbouring colours differ in hue, saturation and lightness; with more subsets than colours, the colours repeat.
_COLOURS = (
    *("#4e79c4", "#e08a3c", "#4da06b", "#b95fb0", "#c9a227", "#3ba3b5"),
    *("#d0605e", "#7a6bc8", "#8aa33a", "#a97450", "#5f86a3", "#d884a8"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """The artifact or shard to show."""

    artifact: Artifact | None  # None for a shard outside of any artifact
    shard: str | StorePath | None = None  # the only one to show: its name in the artifact, or its path without one

    @property
    def name(self) -> str:
        """The name of the target's page, `convert-63347ade`."""
        if self.artifact is None:
            return Path(str(self.shard)).stem
        manifest = self.artifact.manifest
        shard = f"-{Path(str(self.shard)).stem}" if self.shard else ""
        return f"{manifest.stage}-{manifest.fingerprint[:8]}{shard}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewOptions:
    """The options of a page."""

    num_samples: int = 24  # samples or bins, at most
    num_shards: int | None = None  # shards to search for samples, at most; None: a number that opens quickly
    key: str | None = None  # of the only sample to show; None: some samples of every subset
    model: ModelDirectory | None = None  # its tokenizer decodes the tokens; None: search the artifact's root for one
    link_from: Path | None = None  # folder of the page, if it is not the artifact's, see `Lineage`


def render_preview(target: Target, options: PreviewOptions) -> str:
    """Return the page that the stage of an artifact wrote, with the samples of these options; or a page of a shard that
    lies outside of its artifact.

    Raises:
        InputError: there is no such key or shard, or a file of the artifact is missing or damaged.
    """
    if target.artifact is None:
        samples = samples_of_shard(target.shard, options.key, options.num_samples)
        return plain_page(target.shard.name, contents=samples_html(samples))
    contents, shard = _contents(target, options), str(target.shard or "")
    artifact = target.artifact
    return artifact_page(artifact.dir, artifact.manifest, contents, shard, link_from=options.link_from)


def stage_contents(artifact: Artifact, inputs: Mapping[str, Input]) -> Markup:
    """Return the contents on the page that a stage leaves in its artifact. They do not depend on the artifact's path.
    The processor that the stage used decodes the tokens."""
    model = opened_model(inputs["processor"]) if "processor" in inputs else None
    options = PreviewOptions(num_samples=_STAGE_SAMPLES, num_shards=_OPENED_SHARDS, model=model)
    return _contents(Target(artifact), options)


def _contents(target: Target, options: PreviewOptions) -> Markup:
    artifact = target.artifact
    stage, shards = artifact.manifest.stage, artifact.manifest.shards
    if target.shard:
        shards = [shard for shard in shards if shard.name == target.shard]
        if not shards:
            raise InputError(f"{artifact.dir} has no shard {target.shard}; its manifest names the ones it has")
    if stage == "convert" and shards:
        if options.key:
            return samples_html(find_sample(artifact.dir, shards, options.key))
        num_shards = options.num_shards or (_OPENED_SHARDS if is_local(artifact.dir) else _OPENED_REMOTE)
        return samples_html(choose_samples(artifact.dir, shards, options.num_samples, num_shards))
    if stage == "tokenize":
        name = str(target.shard) if target.shard else None
        return tokens_html(artifact, options.num_samples, options.key, name, options.model)
    if stage == "plan_bins":
        return bins_html(artifact, options.num_samples, options.key)
    if options.key:
        raise InputError(f"--key {options.key}: a {stage} artifact holds no samples; leave --key out")
    return Markup()


def find_target(text: str, root: StorePath) -> Target:
    """Return the artifact or shard that `text` names.

    Args:
        text: a directory of an artifact or a path inside it, a shard, or a URL of these. Or, below `root`, a stage's
            name (for its newest artifact), `stage/fingerprint`, or the beginning of a fingerprint.

    Raises:
        InputError: the text names nothing, or several artifacts.
    """
    path = location(text)
    if "://" in text:
        check_reachable(path)
    if path.exists():
        target = _at(path)
        if target is not None:
            return target
    named = None if "://" in text else _by_name(text.strip("/"), root)
    if named is not None:
        return Target(Artifact.load(named))
    stages = [name for name, directories in _artifacts(root).items() if directories]
    way_out = "give the directory of one, a shard, or --root with a stage's name"
    if stages:
        way_out = f"give the directory of one, or one of its stages: {', '.join(stages)}"
    raise InputError(f"{text} is not an artifact: it has no {MANIFEST} and names none below {root}; {way_out}")


def _at(path: StorePath) -> Target | None:
    """Return the artifact at a path or around it, or a shard without an artifact."""
    full = path.absolute() if isinstance(path, Path) else path
    for directory in (full, *list(full.parents)[:_MAX_FOLDERS_UP]):
        if (directory / MANIFEST).is_file():
            is_shard = full.name.endswith(".tar")
            return Target(Artifact.load(directory), f"{full.parent.name}/{full.name}" if is_shard else None)
    return Target(None, path) if path.name.endswith(".tar") and path.is_file() else None


def _by_name(text: str, root: StorePath) -> StorePath | None:
    """Return the newest artifact of a stage, or the artifact whose fingerprint begins with the text."""
    stage, _, prefix = text.rpartition("/")
    if not prefix:
        return None
    artifacts = _artifacts(root)
    if not stage and prefix in artifacts:
        return max(artifacts[prefix], key=lambda directory: (modified(directory / MANIFEST), directory.name))
    if not _FINGERPRINT.fullmatch(prefix):
        return None
    fits = [d for name, dirs in artifacts.items() if stage in ("", name) for d in dirs if d.name.startswith(prefix)]
    if len(fits) > 1:
        names = ", ".join(f"{d.parent.name}/{d.name}" for d in fits[:4])
        raise InputError(f"{text} may be {names}; give more of its fingerprint")
    return fits[0] if fits else None


def _artifacts(root: StorePath) -> dict[str, list[StorePath]]:
    """Return stage -> directories of its finished artifacts."""
    folder = root / "artifacts"
    if not folder.is_dir():
        return {}
    stages = sorted((d for d in folder.iterdir() if d.is_dir()), key=str)
    return {d.name: sorted((a for a in d.iterdir() if (a / MANIFEST).is_file()), key=str) for d in stages}


def bins_html(plan: Artifact, count: int, key: str | None = None) -> Markup:
    """Return bars of some bins of each split, with a navigation bar.

    Raises:
        InputError: no bin holds `key`.
    """
    plans = {split: read_bins(plan.dir, split) for split in SPLITS}
    counts = {"train": count, "heldout": max(1, count // _TRAIN_PER_HELDOUT)}
    chosen: dict[str, Sequence[int]] = {}
    for split, bins in plans.items():
        if not key:
            chosen[split] = evenly(range(len(bins)), counts[split])
        elif not any(chosen.values()):  # a sample is in one split; reading all bins of the other would take long
            chosen[split] = [number for number, refs in enumerate(bins) if any(ref.key == key for ref in refs)]
    if key and not any(chosen.values()):
        raise InputError(f"--key {key}: no bin of {plan.dir} holds it; leave --key out to see some that are there")
    shown = [(split, number, plans[split][number]) for split, numbers in chosen.items() for number in numbers]
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
