"""The frames of a video that a model reads, their size, and the times that its prompt names.

The formulas are those of transformers' Qwen3VLVideoProcessor and Qwen3VLProcessor (5.23): `sample_frames`, `resize`
with `smart_resize`, and `_calculate_timestamps`. They get the true times of the frames. A clip of constant rate gives
exactly their indices, sizes and times. In a clip of variable rate, transformers numbers the frames as if their rate
were constant; here the frames on show at evenly spaced times are chosen, and the prompt names their true times.

Two frames in a row are a group, which the model reads like an image. An odd frame at the end is its own second frame.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from pydantic import Field

from dataset_builders.contracts.sample import SkipSample, Video
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import GROUP_FRAMES, PatchFormat
from dataset_builders.pictures.images import MAX_ASPECT
from dataset_builders.videos.decode import probe

# Containers round times to a tick: 1 ms in WebM and Matroska. The first frame's time is rounded too.
_TICK = 0.001


class VideoConfig(StrictModel):
    """The settings of choosing, resizing and cutting frames, from the model's video_preprocessor_config.json."""

    fps: float = Field(gt=0, description="frames a second that are read")
    min_frames: int = Field(gt=0, description="a short video gives this number of frames, if it has them")
    max_frames: int = Field(gt=0, description="a long video gives this number of frames")
    min_pixels: int = Field(gt=0, description="videos with fewer pixels, over all their frames, are scaled up")
    max_pixels: int = Field(gt=0, description="videos with more pixels, over all their frames, are scaled down")
    cap_pixels_per_frame: bool = Field(description="whether a frame has at most max_video_tokens tokens")
    max_video_tokens: int = Field(gt=0, description="tokens of a frame, if they are capped")
    patch_format: PatchFormat

    @property
    def factor(self) -> int:
        """The number of pixels that both sides of a resized frame are multiples of."""
        return self.patch_format.patch_size * self.patch_format.merge_size


def constant_rate(times: Sequence[float]) -> float | None:
    """Return the frames per second of (n,) seconds, rounded to a container's ticks; None if the rate varies.

    A broadcast rate (a whole number, or one divided by 1.001) is preferred to another one that fits as well.
    """
    if len(times) < 2:
        return None
    since = np.asarray(times, np.float64) - times[0]
    mean = (len(times) - 1) / since[-1]
    whole, ntsc = round(mean), Fraction(round(mean * 1.001) * 1000, 1001)
    for rate in (Fraction(whole), ntsc, Fraction(mean).limit_denominator(1001)):
        if rate and np.abs(since - np.arange(len(times)) / float(rate)).max() <= _TICK:
            return float(rate)
    return None


def choose_frames(times: Sequence[float], config: VideoConfig) -> np.ndarray:
    """Return (m,) int64, the indices of the frames to read, ascending.

    Args:
        times: (n,) seconds of every frame of the video, ascending, n at least 1.
    """
    total = len(times)
    rate = constant_rate(times)
    mean = rate or (total - 1) / (times[-1] - times[0]) if total > 1 else config.fps
    wanted = min(max(int(total / mean * config.fps), config.min_frames), config.max_frames, total)
    if rate is not None or wanted == total:
        return np.linspace(0, total - 1, wanted).round().astype(np.int64)
    # The last frame that began at each time; in float64 an even time may lie just before its frame.
    evenly = np.linspace(times[0], times[-1], wanted) + 1e-9
    return np.unique(np.searchsorted(times, evenly, side="right") - 1)


def group_times(times: Sequence[float]) -> list[float]:
    """Return the seconds of each group, the mean of its two frames. `times` are (m,) seconds of the chosen frames."""
    pairs = [*times, times[-1]] if len(times) % GROUP_FRAMES else times
    return [(first + second) / 2 for first, second in zip(pairs[::GROUP_FRAMES], pairs[1::GROUP_FRAMES])]


def time_text(seconds: float) -> str:
    """Return the text before a group in a prompt."""
    return f"<{seconds:.1f} seconds>"


def resized_frame(num_frames: int, height: int, width: int, config: VideoConfig) -> tuple[int, int]:
    """Return the (height, width) that every frame is resized to. Raises SkipSample above 200 to 1."""
    num_frames = max(num_frames, GROUP_FRAMES)  # transformers refuses a single frame; it is read twice
    factor, max_pixels = config.factor, config.max_pixels
    if config.cap_pixels_per_frame:
        share = min(config.max_video_tokens * factor**2, max_pixels // num_frames)
        max_pixels = num_frames * max(share, int(config.min_pixels * 1.05))
    if min(height, width) < factor:
        scale = factor / min(height, width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise SkipSample("aspect", f"frames of {width} x {height} pixels, over {MAX_ASPECT} to 1")
    # Python's round takes a half to the even multiple: 5 frames count as 4, and 7 as 8.
    new_height, new_width, counted = (
        round(size / unit) * unit for size, unit in ((height, factor), (width, factor), (num_frames, GROUP_FRAMES))
    )
    pixels = num_frames * height * width
    if counted * new_height * new_width > max_pixels:
        shrink = math.sqrt(pixels / max_pixels)
        new_height, new_width = (max(factor, math.floor(s / shrink / factor) * factor) for s in (height, width))
    elif counted * new_height * new_width < config.min_pixels:
        grow = math.sqrt(config.min_pixels / pixels)
        new_height, new_width = (math.ceil(s * grow / factor) * factor for s in (height, width))
    return new_height, new_width


@dataclass(frozen=True, kw_only=True, slots=True)
class FramePlan:
    """The frames of one video that a model reads. It is made from the times and the size of the frames alone."""

    indices: tuple[int, ...]  # (m,) ascending, in the times that the plan was made from
    seconds: tuple[float, ...]  # (m,) in those times: of the frames themselves
    times: tuple[float, ...]  # (t,) seconds of each group that the prompt names, with t half of m, rounded up
    height: int  # of every resized frame, in pixels
    width: int
    patch_size: int

    @property
    def patches(self) -> int:
        """Patches of a frame, before merging; the model encodes this number for each group."""
        return self.height * self.width // self.patch_size**2

    @property
    def grids(self) -> np.ndarray:
        """(t, 3) int32 rows (1, h, w), one for each group."""
        row = [1, self.height // self.patch_size, self.width // self.patch_size]
        return np.array([row] * len(self.times), np.int32)


def plan_frames(
    times: Sequence[float], height: int, width: int, config: VideoConfig, *, is_chosen: bool = False
) -> FramePlan:
    """Return the plan of a video's frames. Raises SkipSample (aspect).

    Args:
        times: (n,) seconds of every frame since the file's first one; the first may be later, if only a part is shown.
        height, width: of a frame in pixels, upright.
        is_chosen: whether the frames are a list that was chosen before; then all are read, up to max_frames.
    """
    total, rate = len(times), None
    if is_chosen:
        chosen = np.linspace(0, total - 1, min(total, config.max_frames)).round().astype(np.int64)
    else:
        chosen, rate = choose_frames(times, config), constant_rate(times)
    seconds = named = [times[index] for index in chosen]
    if rate is not None:  # as transformers: the frame's number in the file by the rate, without a tick's rounding
        first = round(times[0] * rate)
        named = [(first + int(index)) / rate for index in chosen]
    new_height, new_width = resized_frame(len(chosen), height, width, config)
    return FramePlan(
        indices=tuple(chosen.tolist()),
        seconds=tuple(seconds),
        times=tuple(group_times(named)),
        height=new_height,
        width=new_width,
        patch_size=config.patch_format.patch_size,
    )


def plan_video(video: Video, config: VideoConfig) -> FramePlan:
    """Return the plan of a video's frames, from the times in its record or its container; nothing is decoded. Raises
    SkipSample as `probe`."""
    facts = probe(video, decode=False)
    return plan_frames(facts.times, facts.height, facts.width, config, is_chosen=bool(video.frames))
