"""Drawn clips in which one of two shapes moves, as rows of `openai_messages`: small, exact, offline.

A clip has two coloured shapes on a light ground, of different colours and kinds. One of them rests, and the other moves
along one axis in even steps; in clips of moves_when it may rest before and after. No frame by itself shows which of
them moves. There are three subsets:

    moves_what     "What moves?"                           "red ellipse"
    moves_where    "Where does the red ellipse move?"      "left", "right", "up" or "down"
    moves_when     "When does the red ellipse move?"       "0.50 - 1.25 seconds": the times of the first and the last
                                                           frame between which its place changes

A clip is MPEG-4 in mp4 of a constant rate. The same seed gives the same rows with the same version of the encoder.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np

from dataset_builders.sources.shapes import COLOURS, KINDS, mask

SUBSETS = ("moves_what", "moves_where", "moves_when")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
_BITS = 2_000_000  # a second: the shapes keep sharp edges

Row = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveCounts:
    """The numbers of rows, and the sizes of their clips."""

    what: int  # rows of moves_what
    where: int
    when: int
    fps: int
    frames: int  # of a clip, 4 to 32
    side: int  # of a clip, in pixels; at least 48, and a multiple of 16


@dataclass(frozen=True, slots=True)
class Clip:
    """One drawn clip, and what happens in it."""

    frames: np.ndarray  # (n, side, side, 3) uint8
    mover: str  # colour and kind: "red ellipse"
    direction: str  # one of DIRECTIONS
    first: int  # the mover rests up to this frame
    last: int  # it rests from this frame on


def iter_move_rows(seed: int, counts: MoveCounts) -> Iterator[tuple[str, Row]]:
    """Yield (subset, row) in order of the subsets; the rows are the same for the same seed and counts."""
    for stream, (subset, number) in enumerate(zip(SUBSETS, (counts.what, counts.where, counts.when))):
        rng = np.random.default_rng([seed, stream])
        for _ in range(number):
            clip = draw_clip(rng, counts, is_short=subset == "moves_when")
            question, answer = _asked(subset, clip, counts.fps)
            yield (
                subset,
                {
                    "messages": [
                        {"role": "user", "content": f"<video>{question}"},
                        {"role": "assistant", "content": answer},
                    ],
                    "videos": [{"bytes": _encoded(clip.frames, counts.fps), "path": None}],
                },
            )


def _asked(subset: str, clip: Clip, fps: int) -> tuple[str, str]:
    if subset == "moves_what":
        return "What moves?", clip.mover
    if subset == "moves_where":
        return f"Where does the {clip.mover} move?", clip.direction
    return f"When does the {clip.mover} move?", f"{clip.first / fps:.2f} - {clip.last / fps:.2f} seconds"


def draw_clip(rng: np.random.Generator, counts: MoveCounts, is_short: bool) -> Clip:
    """Return a clip; `is_short`: whether the movement may begin and end anywhere, and not with the clip."""
    side, number = counts.side, counts.frames
    colours = rng.permutation(tuple(COLOURS))[:2]
    kinds = rng.permutation(KINDS)[:2]
    direction = tuple(DIRECTIONS)[rng.integers(len(DIRECTIONS))]
    along = np.array(DIRECTIONS[direction])
    first, last = 0, number - 1
    if is_short:
        first = int(rng.integers(0, number - 2))
        last = int(rng.integers(first + 1, number))
    # The two shapes have bands of their own across the direction, so that they never meet.
    band = side // 2
    sizes = rng.integers(side // 5, side // 3, (2, 2))  # (width, height) of each
    steps = last - first
    longest = side - int(sizes[0] @ np.abs(along))
    travel = int(rng.integers(max(steps, longest // 3), longest + 1))  # at least a pixel from a frame to the next
    places = np.zeros((2, 2), np.int64)
    axis = int(np.abs(along).argmax())
    order = rng.permutation(2)
    for shape in range(2):
        places[shape, 1 - axis] = order[shape] * band + rng.integers(band - sizes[shape, 1 - axis] + 1)
        places[shape, axis] = rng.integers(side - sizes[shape, axis] + 1)
    low = int(rng.integers(longest - travel + 1))
    start = low if along[axis] > 0 else low + travel
    ground = rng.integers(200, 256, 3)
    frames = np.empty((number, side, side, 3), np.uint8)
    for frame in range(number):
        share = np.clip((frame - first) / steps, 0, 1)
        places[0, axis] = start + int(along[axis]) * round(float(share * travel))
        frames[frame] = ground
        for shape in (1, 0):
            (x, y), (width, height) = places[shape], sizes[shape]
            colour = COLOURS[str(colours[shape])]
            frames[frame, y : y + height, x : x + width][mask(str(kinds[shape]), int(width), int(height))] = colour
    return Clip(frames, f"{colours[0]} {kinds[0]}", direction, first, last)


def _encoded(frames: Sequence[np.ndarray], fps: int) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt, stream.bit_rate = "yuv420p", _BITS
        stream.codec_context.thread_count = 1
        for number, pixels in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(pixels, "rgb24")
            picture.pts = number
            file.mux(stream.encode(picture))
        file.mux(stream.encode(None))
    return out.getvalue()
