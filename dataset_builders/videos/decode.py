"""Facts and frames of videos: files, decoded in a process of their own, and lists of frames.

A decoder is a large program that hostile bytes may crash, stop or fill with memory. So no video file is decoded in our
own processes: `decode_process.py` has limits of CPU seconds and memory for each file, and a new one is started after
some files. Frames are upright, as players show them. Pixels that are not square stay as they are stored.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dataset_builders.contracts.sample import SkipSample, Video
from dataset_builders.pictures.images import PILLOW_PIXEL_LIMIT, ImageLimits, check_image, check_size, read_rgb

CPU_SECONDS = 600  # for a file; an hour of 640 x 360 pixels takes some 100 s
MEMORY = 2 << 30  # bytes, in addition to those of the process at its start and of the file
_FILES_OF_A_PROCESS = 512  # what a decoder leaks ends with its process
_END_SECONDS = 0.2  # then a process that should end is killed
_PROGRAM = Path(__file__).with_name("decode_process.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoLimits:
    """Limits that are checked before pixels are read, or while a file is decoded."""

    max_pixels: int = PILLOW_PIXEL_LIMIT  # width * height of a frame
    min_side: int = 1  # the shorter side in pixels
    max_frames: int = 10**6  # between start and end


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFacts:
    """The facts of a video that can be decoded; n is the number of its frames between start and end."""

    times: tuple[float, ...]  # (n,) seconds since the file's first frame, rising; of a list of frames: its timestamps
    height: int  # in pixels, upright, as `read_frames` gives them
    width: int
    has_audio: bool
    codec: str  # libavcodec's name, such as h264; of a list of frames: Pillow's name of their format


def decoder() -> str:
    """Return name and version of the program that decodes files. Other versions may give other pixels."""
    import av  # 0.2 s, and only where a row has a video

    version = ".".join(map(str, av.library_versions["libavcodec"]))
    return f"pyav {av.__version__} / libavcodec {version}"


def probe(video: Video, limits: VideoLimits | None = None, decode: bool = True) -> VideoFacts:
    """Return the facts of a video.

    Args:
        decode: whether every frame up to the end is decoded. Without, the times of frames are the container's, and a
            frame that is damaged passes.

    Raises:
        SkipSample: decode_error, truncated_image, bomb, too_small, aspect, no_frames, no_times, too_many_frames; of a
            list of frames also bad_mode.
    """
    video.check()
    limits = limits or VideoLimits()
    if video.frames:
        return _facts_of_frames(video, limits, decode)
    (outcome,) = _decoders(os.getpid()).read(video, limits, decode, None)
    check_size(outcome["width"], outcome["height"], _image_limits(limits))
    return VideoFacts(**outcome | {"times": tuple(outcome["times"])})


def iter_frames(video: Video, indices: Sequence[int], times: Sequence[float] | None = None) -> Iterator[np.ndarray]:
    """Yield the frames of these indices of `VideoFacts.times`, each (height, width, 3) uint8 RGB. Indices must rise.

    Args:
        times: the times of these frames, if the facts were those of the container: a frame with another time is
            refused as `no_times`.

    Raises as `probe`, perhaps after some frames.
    """
    if any(b <= a for a, b in itertools.pairwise(indices)) or any(index < 0 for index in indices):
        raise ValueError(f"indices must rise from 0 on: {list(indices)[:20]}")
    video.check()
    if video.frames:
        shown = _shown(video)
        for index in indices:
            if index >= len(shown):
                raise SkipSample("no_frames", f"frame {index} is asked for, and there are {len(shown)}")
            yield read_rgb(video.frames[shown[index]])
        return
    if indices:
        expected = [None] * len(indices) if times is None else times
        for item in _decoders(os.getpid()).read(video, VideoLimits(), True, dict(zip(indices, expected, strict=True))):
            if isinstance(item, np.ndarray):
                yield item


def read_frames(video: Video, indices: Sequence[int]) -> np.ndarray:
    """Return the result of `iter_frames` as (n, height, width, 3) uint8; indices may be in any order and repeat."""
    distinct = sorted(set(indices))
    frames = dict(zip(distinct, iter_frames(video, distinct), strict=True))
    return np.stack([frames[index] for index in indices])


def _image_limits(limits: VideoLimits) -> ImageLimits:
    return ImageLimits(max_pixels=limits.max_pixels, min_side=limits.min_side)


def _shown(video: Video) -> list[int]:
    """Return the numbers of the frames of a list that lie between start and end."""
    start, end = video.start or 0.0, float("inf") if video.end is None else video.end
    return [number for number, time in enumerate(video.timestamps) if start <= time <= end]


def _facts_of_frames(video: Video, limits: VideoLimits, decode: bool) -> VideoFacts:
    shown = _shown(video)
    if not shown:
        raise SkipSample(
            "no_frames", f"none of {len(video.frames)} frames is between {video.start} s and {video.end} s"
        )
    if len(shown) > limits.max_frames:
        raise SkipSample("too_many_frames", f"{len(shown)} frames, the limit is {limits.max_frames}")
    infos = []
    for number in shown:
        try:
            infos.append(check_image(video.frames[number], _image_limits(limits), decode))
        except SkipSample as skip:
            raise SkipSample(skip.reason, f"frame {number}: {skip.detail}") from None
        size, first = ((info.width, info.height) for info in (infos[-1], infos[0]))
        if size != first:
            detail = f"frame {number} is {size[0]} x {size[1]} px, and the first is {first[0]} x {first[1]} px"
            raise SkipSample("decode_error", detail)
    times = tuple(video.timestamps[number] for number in shown)
    return VideoFacts(times=times, height=infos[0].height, width=infos[0].width, has_audio=False, codec=infos[0].format)


@cache
def _decoders(owner: int) -> "_Decoders":
    """Return this process's decoders; `owner` is its id, since a forked child must not write into its parent's pipe."""
    return _Decoders()


class _Decoders:
    """Readers of files by `decode_process.py`. One waits for the next file, and a file that is read has its own."""

    def __init__(self) -> None:
        # At most one, with the function that ends it, and the number of files that it read.
        self._waiting: list[tuple[subprocess.Popen[bytes], Callable[[], int], int]] = []

    def read(
        self, video: Video, limits: VideoLimits, decode: bool, indices: Mapping[int, float | None] | None
    ) -> Iterator[np.ndarray | dict[str, Any]]:
        """Yield the frames that are asked for, in order, and the outcome; SkipSample for a file that is refused."""
        request = {
            **{"size": len(video.data), "start": video.start, "end": video.end, "decode": decode},
            **asdict(limits),
            "indices": None if indices is None else [int(index) for index in indices],
            "expected": None if indices is None else list(indices.values()),
        }
        process, end, num_files = self._waiting.pop() if self._waiting else self._start()
        outcome = None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.write(video.data)
                process.stdin.flush()
            while outcome is None and (line := process.stdout.readline()).endswith(b"\n"):
                head = json.loads(line)
                if "index" not in head:
                    outcome = head
                    break
                pixels = process.stdout.read(head["height"] * head["width"] * 3)
                if len(pixels) < head["height"] * head["width"] * 3:
                    break
                yield np.frombuffer(pixels, np.uint8).reshape(head["height"], head["width"], 3)
        finally:  # without an outcome the process died, or nobody wants the rest of the frames
            if outcome is not None and num_files + 1 < _FILES_OF_A_PROCESS and not self._waiting:
                self._waiting.append((process, end, num_files + 1))
            else:
                status = end()
        if outcome is None:
            why = f"takes over {CPU_SECONDS} s of CPU" if status == -signal.SIGPROF else f"ends its process ({status})"
            raise SkipSample("bomb" if status == -signal.SIGPROF else "decode_error", f"decoding {why}")
        if "reason" in outcome:
            raise SkipSample(outcome["reason"], f"{len(video.data)} bytes: {outcome['detail']}")
        yield outcome

    def _start(self) -> tuple[subprocess.Popen[bytes], Callable[[], int], int]:
        # -P: nothing is imported from the program's folder.
        command = [sys.executable, "-P", "-W", "ignore", str(_PROGRAM)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        process.stdin.write(json.dumps({"memory": MEMORY, "cpu_seconds": CPU_SECONDS}).encode() + b"\n")
        return process, weakref.finalize(self, _end, process), 0


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the process, and return its exit status: its own, if it ended before."""
    process.stdout.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # one that waits for a file ends at once
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(timeout=_END_SECONDS)  # a process that died by itself has its own status
    process.kill()
    return process.wait()
