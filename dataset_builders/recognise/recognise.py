"""The choice of a source's reading: every candidate reads the first rows, and the one with most samples wins."""

from dataclasses import dataclass, replace

from dataset_builders.pictures.images import ImageLimits
from dataset_builders.recognise.candidates import Survey, survey
from dataset_builders.recognise.reading import Reading
from dataset_builders.recognise.trial import Trial, try_reading
from dataset_builders.sources.registry import get_builder
from dataset_builders.storage.store import StorePath

ENOUGH = 0.5  # share of usable rows at which a reading of a lower tier is preferred
_ROOT_ROWS = 10  # number of rows on which each possible image_root is tried


@dataclass(frozen=True, slots=True)
class Recognised:
    """The result of recognising a source.

    Attributes:
        survey: the source's files and candidate readings.
        best: the trial of the best reading; None if no reading gives a sample.
        trials: the trials of all readings, in order.
    """

    survey: Survey
    best: Trial | None
    trials: list[Trial]


def recognise(source: StorePath, limits: ImageLimits) -> Recognised:
    """Find the candidate readings of a source and try each one.

    Raises:
        InputError: there is no such source, or a file is a link that leads out of it.
    """
    found = survey(source)
    trials = [_with_image_root(source, reading, found, limits) for reading in found.readings]
    usable = [trial for trial in trials if trial.samples]
    good = [trial for trial in usable if trial.usable >= ENOUGH]
    best = min(good, key=lambda t: (t.reading.tier, -t.usable * t.rows), default=None)
    return Recognised(found, best or max(usable, key=lambda t: t.usable * t.rows, default=None), trials)


def _with_image_root(source: StorePath, reading: Reading, found: Survey, limits: ImageLimits) -> Trial:
    """Try a reading; if most images are not found, choose the directory that its image paths are relative to."""
    trial = try_reading(source, reading, limits=limits)
    has_root = "image_root" in get_builder(reading.builder).options.model_fields
    if not has_root or trial.reasons["image_not_found"] <= trial.tried / 2:
        return trial
    roots = [replace(reading, options={**reading.options, "image_root": name}) for name in (".", *found.image_dirs)]
    tries = [try_reading(source, rooted, limit=_ROOT_ROWS) for rooted in roots]
    best = max(tries, key=lambda t: t.usable, default=trial)
    return try_reading(source, best.reading, limits=limits) if best.usable > trial.usable else trial
