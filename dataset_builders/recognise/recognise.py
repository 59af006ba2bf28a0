"""The choice of a source's reading: every candidate reads the first rows, and the one with most samples wins."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dataset_builders.pictures.images import ImageLimits
from dataset_builders.readers.parts import words_of
from dataset_builders.recognise.candidates import Survey, survey
from dataset_builders.recognise.reading import Reading
from dataset_builders.recognise.trial import Trial, try_image_roots, try_reading
from dataset_builders.sources.registry import get_builder
from dataset_builders.storage.store import StorePath

ENOUGH = 0.5  # share of usable rows at which a reading of a lower tier is preferred


@dataclass(frozen=True, slots=True)
class Recognised:
    """The result of recognising a source."""

    survey: Survey
    best: Trial | None  # of the best reading; None if no reading gives a sample
    trials: list[Trial]  # of all readings, in order


def recognise(source: StorePath, limits: ImageLimits) -> Recognised:
    """Find the candidate readings of a source and try each one."""
    found = survey(source)
    trials = [_with_image_root(source, reading, found, limits) for reading in found.readings]
    usable = [trial for trial in trials if trial.samples]
    good = [trial for trial in usable if trial.usable >= ENOUGH]
    best = min(good, key=lambda t: (t.reading.tier, -t.usable * t.rows), default=None)
    return Recognised(found, best or max(usable, key=lambda t: t.usable * t.rows, default=None), trials)


def _with_image_root(source: StorePath, reading: Reading, found: Survey, limits: ImageLimits) -> Trial:
    """Try a reading; where images are not found, choose for each file the directory that its paths are relative to."""
    trial = try_reading(source, reading, limits=limits)
    has_root = "image_root" in get_builder(reading.builder).options.model_fields
    if not has_root or not trial.reasons["image_not_found"]:
        return trial
    chosen: dict[str, str] = {}
    for name, usable in try_image_roots(source, reading, ("", ".", *found.image_dirs)).items():
        fits = [root for root, share in usable.items() if share == max(usable.values())]
        root = fits[0] if fits[0] == "" or len(fits) == 1 else _named_alike(name, fits)
        if root is None:
            which = f"its images are found in {fits[0]} and in {fits[1]}, which may differ"
            return Trial(reading, refused=f"{name}: {which}; write the folder into each path of its rows")
        chosen[name] = root
    image_root = chosen if len(set(chosen.values())) > 1 else next(iter(chosen.values()), "")
    if not image_root:
        return trial
    return try_reading(source, replace(reading, options={**reading.options, "image_root": image_root}), limits=limits)


def _named_alike(name: str, roots: Sequence[str]) -> str | None:
    """Return the only one of the directories that has the most words in common with a file's name; None if none has."""
    common = {root: len(words_of(root) & words_of(name.rpartition(".")[0])) for root in roots}
    best = [root for root, number in common.items() if number and number == max(common.values())]
    return best[0] if len(best) == 1 else None
