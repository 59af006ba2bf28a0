"""A contact sheet: some frames of a video in a row, for pages that show samples."""

from collections.abc import Sequence

import numpy as np

from dataset_builders.contracts.sample import Video
from dataset_builders.pictures.images import frames_png
from dataset_builders.videos.decode import VideoFacts, iter_frames, probe

SHOWN_FRAMES = 4


def contact_sheet(video: Video, side: int, count: int = SHOWN_FRAMES) -> tuple[bytes, tuple[float, ...], VideoFacts]:
    """Return a PNG of at most `count` frames, evenly spread from the first to the last, each shrunk to fit into side x
    side pixels, the seconds of these frames, and the video's facts.

    Raises:
        SkipSample: as `probe`.
    """
    facts = probe(video, decode=False)
    indices = spread(len(facts.times), count)
    png = frames_png(list(iter_frames(video, indices)), side)
    return png, tuple(facts.times[index] for index in indices), facts


def spread(total: int, count: int) -> Sequence[int]:
    """Return at most `count` indices below `total`, with the first and the last."""
    return sorted({int(index) for index in np.linspace(0, total - 1, min(total, count)).round()})
