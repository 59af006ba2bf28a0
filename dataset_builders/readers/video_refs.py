"""A video as a row names it -> Video.

    "clips/1.mp4"                                       a path, a data URI or an object's address, as of an image
    b"\\x00\\x00\\x00 ftypisom..."                         the file itself
    ["1.jpg", "2.jpg"]                                  frames, whose rate `options.frame_rate` gives
    {"path": "clips/1.mp4", "start": 2.5, "end": 8}     a part of a file, in seconds since its first frame
    {"frames": ["1.jpg", "2.jpg"], "fps": 2}            frames that were taken at this rate; the first is at 0 s, or
                                                        at `start`
    {"frames": ["1.jpg", "2.jpg"], "timestamps": [0, 4.5]}

Other tools' names are read, too: `video`, `url`, `bytes` and `video_url` for `path`, a list in any of them for
`frames`; `sample_fps` for `fps`; `video_start` and `video_end`. A list of frames without a rate is left out: other
tools take 2 frames a second for it, whatever it is. How frames are chosen from a file is a setting of tokenization, so
a file's own `fps`, `nframes`, `max_pixels` and the like are not read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pydantic import Field

from dataset_builders.contracts.sample import SkipSample, Video
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.readers.image_refs import MAX_IMAGE_BYTES, MAX_VIDEO_BYTES
from dataset_builders.readers.source_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from dataset_builders.readers.text_files import json_type

Read = Callable[[str, int], bytes]  # (name of a file, most bytes that it may have) -> its bytes

# Names that people and tools give to a row's video or videos, the most usual ones first.
VIDEO_NAMES = (
    *("video", "videos", "clip", "clips", "video_path", "video_paths", "video_file", "video_files", "video_url"),
    *("video_urls", "video_name", "movie"),
)
_FILE_NAMES = ("frames", "bytes", "path", "url", "video", "video_url")
_RATES = ("fps", "sample_fps")
_STARTS, _ENDS = ("start", "video_start"), ("end", "video_end")
# What tools say beside a file of how its frames are to be chosen and sized.
SAMPLING = (
    *("nframes", "num_frames", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"),
    *("resized_height", "resized_width", "do_sample_frames", "detail"),
)
_FRAMES = tuple(suffix for suffix in IMAGE_SUFFIXES if suffix != "gif")
_KEYS = (*_FILE_NAMES, *_RATES, *_STARTS, *_ENDS, "timestamps", *SAMPLING)


class VideoOptions(StrictModel):
    """Facts of videos that rows do not state."""

    frame_rate: float | None = Field(
        default=None,
        gt=0,
        le=1000,
        description="frames a second of the lists of frames that state neither fps nor timestamps; null: such rows are "
        "left out",
    )


@dataclass(frozen=True, slots=True)
class VideoRef:
    """A video whose files are not read yet."""

    files: tuple[str | bytes, ...]  # one file, or frames
    is_file: bool
    timestamps: tuple[float, ...] = ()
    start: float | None = None
    end: float | None = None

    def video(self, read: Read) -> Video:
        """Return the video with the bytes of its files; SkipSample if one cannot be read, and as `Video.check`."""
        limit = MAX_VIDEO_BYTES if self.is_file else MAX_IMAGE_BYTES
        files = tuple(file if isinstance(file, bytes) else read(file, limit) for file in self.files)
        if self.is_file:
            video = Video(data=files[0], start=self.start, end=self.end)
        else:
            video = Video(frames=files, timestamps=self.timestamps)
        video.check()
        return video

    def check(self) -> Video:
        """Return the video with files of one byte: all that is known of it before a file is read."""
        return self.video(lambda name, limit: b"?")


def videos_of(record: Mapping[str, Any], frame_rate: float | None) -> list[VideoRef] | None:
    """Return the videos of a row, a list or a single one, from its only field of VIDEO_NAMES.

    None: the row has no such field, or only null. SkipSample is raised for another type, and for two such fields.
    """
    present = video_fields(record)
    if len(present) > 1:
        raise SkipSample("schema_error", f"both {present[0]!r} and {present[1]!r}: which are the row's videos?")
    if not present:
        return None
    value = record[present[0]]
    # A list of pictures is one video, and any other list has one video in each item.
    items = value if isinstance(value, list) and not _is_list_of_frames(value) else [value]
    return [video_ref(item, f"{present[0]}[{i}]", frame_rate) for i, item in enumerate(items)]


def video_fields(record: Mapping[str, Any]) -> list[str]:
    """Return the fields `video` and `videos` that hold something, else others of VIDEO_NAMES that hold a video: a
    `movie` may be a title."""
    present = [field for field in VIDEO_NAMES if record.get(field) not in (None, "", [], {})]
    certain = [field for field in present if field in ("video", "videos")]
    held = {field: record[field] for field in present}
    return certain or [name for name, value in held.items() if looks_like_video(value) or _is_list_of_frames(value)]


def video_ref(value: Any, where: str, frame_rate: float | None, beside: Mapping[str, Any] | None = None) -> VideoRef:
    """Return a reference to one video.

    Args:
        where: the place of the value in its row, for messages.
        frame_rate: of a list of frames that states none.
        beside: further keys that speak of the video, such as those of a content part.
    """
    about = dict(beside or {})
    if isinstance(value, Mapping):
        if unread := [name for name in value if name not in _KEYS and value[name] is not None]:
            raise SkipSample("schema_error", f"{where} has {unread[0]!r}, which is not read; it may have {_known()}")
        about |= {name: each for name, each in value.items() if each is not None}
        names = [name for name in _FILE_NAMES if about.get(name) is not None]
        if not names:
            raise SkipSample("schema_error", f"{where} names no video; it may have {_known()}")
        if names[0] == "frames" and len(names) > 1:
            raise SkipSample("schema_error", f"{where} has both 'frames' and {names[1]!r}: which is the video?")
        value = about[names[0]]
        about = {name: each for name, each in about.items() if name not in _FILE_NAMES}
        if isinstance(value, Mapping):
            return video_ref(value, f"{where}.{names[0]}", frame_rate, about)
    if not isinstance(value, list):
        start, end = (_seconds(about, names, where) for names in (_STARTS, _ENDS))
        return VideoRef((_file(value, where),), True, start=start, end=end)
    frames = tuple(_file(frame, f"{where}[{i}]") for i, frame in enumerate(value))
    if not frames:
        raise SkipSample("no_frames", f"{where} is an empty list of frames")
    return _shown(frames, about, where, frame_rate)


def _shown(frames: tuple[str | bytes, ...], about: Mapping[str, Any], where: str, frame_rate: float | None) -> VideoRef:
    """Return a list of frames with their times, without those before start or after end if there are timestamps."""
    start, end = (_seconds(about, names, where) for names in (_STARTS, _ENDS))
    if about.get("timestamps") is not None:
        times = about["timestamps"]
        if not isinstance(times, list) or not all(map(_is_number, times)):
            raise SkipSample("schema_error", f"{where}.timestamps is {str(times)[:80]}, no array of numbers")
        if len(times) != len(frames):
            raise SkipSample("no_times", f"{where} has {len(frames)} frames and {len(times)} timestamps")
        low, high = start or 0.0, float("inf") if end is None else end
        shown = [i for i, time in enumerate(times) if low <= time <= high]
        if not shown:
            raise SkipSample("no_frames", f"{where} has no frame between {low:g} s and {high:g} s")
        return VideoRef(tuple(frames[i] for i in shown), False, tuple(float(times[i]) for i in shown))
    # Where the frames were taken from is only told by the other tools' `sample_fps`; `fps` beside it is a wish.
    rates = [about[name] for name in reversed(_RATES) if about.get(name) is not None]
    rate = rates[0] if rates else frame_rate
    if not _is_number(rate) or not 0 < rate < float("inf"):
        said = "no fps and no timestamps" if rate is None else f"fps {rate!r:.40}"
        raise SkipSample("no_times", f"{where} is a list of frames with {said}; set options.frame_rate if all have one")
    # Frames without timestamps are those of the part that begins at `start`, and nothing is cut.
    times = tuple((start or 0.0) + number / rate for number in range(len(frames)))
    if end is not None and times[-1] > end:
        span = f"from {times[0]:g} s to {times[-1]:g} s"
        detail = f"{len(frames)} frames at fps {rate:g} go {span}, and end is {end:g} s"
        raise SkipSample("no_times", f"{where}: {detail}; give timestamps")
    return VideoRef(frames, False, times)


def looks_like_video(value: Any) -> bool:
    """Whether a value is a video file, the name or address of one, a list of these, or an object that holds one."""
    if isinstance(value, list):
        return bool(value) and all(map(looks_like_video, value))
    if isinstance(value, Mapping):
        names = [value[name] for name in _FILE_NAMES if value.get(name) is not None]
        return bool(names) and (looks_like_video(names[0]) or _is_list_of_frames(names[0]))
    if isinstance(value, bytes):
        return value[4:8] == b"ftyp" or value[:4] in (b"\x1a\x45\xdf\xa3", b"FLV\x01") or value[8:12] == b"AVI "
    return isinstance(value, str) and is_named(value, "data:video/", VIDEO_SUFFIXES)


def is_named(text: str, uri: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a text is a data URI that begins so, or the name of a file with one of these suffixes."""
    plain = text.strip().lower().partition("?")[0]
    return plain.startswith(uri) or plain.rpartition(".")[2] in suffixes


def _is_list_of_frames(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    names = [item.get("path") or item.get("url") if isinstance(item, dict) else item for item in values]
    # A GIF in a list of videos has its own frames and times.
    are_named = (isinstance(name, str) and is_named(name, "data:image/", _FRAMES) for name in names)
    return bool(names) and all(are_named)


def _file(value: Any, where: str) -> str | bytes:
    if isinstance(value, Mapping):
        names = [value[name] for name in ("bytes", "url", "path", "image") if value.get(name) is not None]
        value = names[0] if names else None
    if not isinstance(value, str | bytes):
        raise SkipSample("schema_error", f"{where}: {json_type(value)} where a file's name should be")
    return value


def _seconds(about: Mapping[str, Any], names: tuple[str, ...], where: str) -> float | None:
    found = [(name, about[name]) for name in names if about.get(name) is not None]
    if not found:
        return None
    name, value = found[0]
    if not _is_number(value) or not isfinite(value) or value < 0:
        raise SkipSample("schema_error", f"{where}.{name} is {str(value)[:40]!r}, no number of seconds from 0 on")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _known() -> str:
    return ", ".join(("path", "frames", "fps", "start", "end", "timestamps"))
