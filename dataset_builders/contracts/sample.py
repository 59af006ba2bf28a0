"""Sample: one conversation with its images and videos, in one form for every source dataset, and its record in a shard.

train/shard-00000.tar
    ai2d/00001234.json         {"messages": [{"role", "text", "is_learnt", "reasoning", "references", "boxes"}],
                                "images": [{"name", "sha256"}], "digest",
                                "videos": [{"files": [{"name", "sha256"}], "start", "end", "timestamps"}]}
    ai2d/00001234.0.png        the original bytes, untouched
    ai2d/00001234.video0.mp4   a video's file; a list of frames has video0.00000.jpg, video0.00001.jpg, ...

`is_learnt` is written only if it is false; `reasoning`, `references`, `boxes`, `videos` and the times of a video only
if they are there.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from dataset_builders.contracts.boxes import BOX_SLOT, BoxPlace, places_from_json, places_to_json

IMAGE_SLOT = "<image>"
VIDEO_SLOT = "<video>"
Role = Literal["system", "user", "assistant"]
Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
_KEY = re.compile(r"[A-Za-z0-9_-]+/[0-9]{8,}(-[0-9]+)?")
_TURN = re.compile(r"-t[0-9]+$")
_CONTROL_CHARS = re.compile(r"[\x00-\x08\x0b-\x1f]")  # every control character except tab and newline
_SURROGATES = re.compile(r"[\ud800-\udfff]")  # JSON can contain a lone surrogate; UTF-8 cannot
# The first bytes of an image or a video -> the suffix of its member; WebP, AVI and mp4 have theirs further on.
_MAGIC = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"II*\x00": "tif", b"MM\x00*": "tif", b"BM": "bmp"}
_MAGIC |= {b"\x1a\x45\xdf\xa3": "mkv", b"FLV": "flv", b"\x00\x00\x01\xba": "mpg", b"G@": "ts"}
# What other tools replace by an image or a place in it. A model would be trained on these letters.
_PLACEHOLDER = re.compile(
    r"<\|?/?(?:image|img|picture|video|audio)s?(?:[ _-]?(?:\d+|here|placeholder|pad|token|context|soft[ _]token))?\|?>"
    r"|<start_of_image>|<\|?(?:bbox|ref-object)\|?>|(?-i:\[IMG(?:[ _-]?\d+)?\])",
    re.IGNORECASE,
)


def subset_of(key: str) -> str:
    return key.partition("/")[0]


def turn_key(key: str, turn: int) -> str:
    """Return the key of the part of a cut sample that ends with answer number `turn`, from 0."""
    return f"{key}-t{turn}"


def whole_key(key: str) -> str:
    """Return the key of the sample that a part was cut from; any other key is returned unchanged."""
    return _TURN.sub("", key) if "-t" in key else key


class SkipSample(Exception):
    """One sample cannot be used. It is left out, `reason` is counted, and `detail` is written to the quarantine."""

    def __init__(self, reason: str, detail: str = "") -> None:
        if reason not in SKIP_REASONS:
            raise ValueError(f"unknown skip reason {reason!r}; add it to SKIP_REASONS with its meaning")
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail.encode("utf-8", "backslashreplace").decode()  # it may quote text that is not valid Unicode


SKIP_REASONS: dict[str, str] = {
    "schema_error": "the raw row lacks a field or has another type there",
    "json_parse_error": "text that should be JSON, a whole line or a field of a row, is not",
    "bad_role": "a role other than system, user and assistant, or roles in an order that is no conversation",
    "duplicate_key": "a row before it has the same key",
    "no_text": "the raw row has no turn at all",
    "empty_prompt": "a user turn without text, image and video",
    "empty_target": "an assistant turn without text",
    "image_count_mismatch": "the number of image slots in the text is not the number of images",
    "video_count_mismatch": "the number of video slots in the text is not the number of videos",
    "bad_box": "a box outside its image, without area, turned, or in another convention than was declared",
    "box_count_mismatch": "the number of places for boxes in the text is not the number that the row has boxes for",
    "undeclared_boxes": "coordinates in the text, and no option says in which convention they are",
    "special_token_in_text": "the text holds a special token of the tokenizer, an image slot, or a placeholder",
    "control_chars": "the text holds control characters other than tab and newline",
    "image_not_found": "the image or video that the row points at is not there, or lies outside the source",
    "decode_error": "the bytes are no image or video that can be decoded to its end",
    "truncated_image": "the bytes of the image or video end early",
    "bomb": "the image or frame has more pixels than the limit, or its file more work in it than pixels explain",
    "too_small": "the image or video has a side shorter than the limit",
    "aspect": "the longer side of the image or video is over 200 times the shorter one",
    "bad_mode": "a pixel format without an agreed conversion to 8-bit RGB",
    "no_frames": "a video without a frame, or with none between its start and its end",
    "no_times": "a video whose frames have no times, or times that do not rise",
    "too_many_frames": "a video with more frames than the limit",
    "too_many_patches": "more vision patches than a bin may hold",
    "too_many_images": "more images than a bin may hold",
    "over_length": "more tokens than max_seq_len",
    "duplicate_sample": "the same images, videos and messages were seen before",
    "mask_span_mismatch": "the assistant spans found in the token ids are not the answers that were rendered",
    "empty": "the image, the video or the JSON of the row has zero bytes",
    "no_name": "a member of a tar with nothing before its field, such as .txt, which belongs to no sample",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a conversation. In its text, `IMAGE_SLOT` and `VIDEO_SLOT` mark where an image or a video goes
    (only in a user's), `BOX_SLOT` where boxes are written."""

    role: Role
    text: str
    is_learnt: bool = True  # whether an assistant's message is trained on; False: it is only context
    reasoning: str = ""  # before `text` in an assistant's message
    # All answers that count as right for an assistant's message, repeats included, if the source has more than the one
    # that is trained on (ten annotators, say). Used only for scores; not part of `Sample.digest`.
    references: tuple[str, ...] = ()
    boxes: tuple[BoxPlace, ...] = ()  # one for each `BOX_SLOT` in `text`, in order of appearance


@dataclass(frozen=True, kw_only=True, slots=True)
class Video:
    """One video: a file, or a list of frames that were taken from one. Times are seconds since the first frame."""

    data: bytes = b""  # the container file, untouched; empty if there are `frames`
    frames: tuple[bytes, ...] = ()  # encoded images in order
    timestamps: tuple[float, ...] = ()  # of each of `frames`, rising; empty for a file, which has its own
    start: float | None = None  # frames before it are not shown; None: from the first on
    end: float | None = None  # frames after it are not shown; None: to the last

    @property
    def files(self) -> tuple[bytes, ...]:
        """The file, or the frames."""
        return self.frames or (self.data,)

    def check(self) -> None:
        """Raise SkipSample for times that are no times, or without a file, frames or their times."""
        if not self.frames and not self.data:
            raise SkipSample("empty", "a video has zero bytes")
        if self.frames and self.data:
            raise SkipSample("no_frames", "a video has a file or a list of frames, and this one has both")
        if len(self.timestamps) != len(self.frames):
            detail = f"{len(self.frames)} frames and {len(self.timestamps)} timestamps; give fps, or one for each frame"
            raise SkipSample("no_times", detail)
        if not all(map(math.isfinite, self.timestamps)) or any(b <= a for a, b in pairwise(self.timestamps)):
            raise SkipSample("no_times", f"timestamps of frames must rise: {str(self.timestamps)[:80]}")
        start, end = self.start or 0.0, math.inf if self.end is None else self.end
        if not 0 <= start <= end:
            raise SkipSample("no_frames", f"it ends at {end} s, and starts at {start} s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One conversation."""

    key: str  # unique and stable across rebuilds, subset/00001234; also the stem of its members' names in a shard
    messages: tuple[Message, ...]  # a user message comes before each assistant message
    images: tuple[bytes, ...]  # the original encoded bytes, one for each `IMAGE_SLOT`, in order of appearance
    videos: tuple[Video, ...] = ()  # one for each `VIDEO_SLOT`, in order of appearance

    @property
    def subset(self) -> str:
        return subset_of(self.key)

    @property
    def files(self) -> tuple[bytes, ...]:
        """The images, and then the files of each video."""
        return (*self.images, *(file for video in self.videos for file in video.files))

    def check(self) -> None:
        """Raise SkipSample if the conversation contradicts itself, ValueError for a malformed key."""
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"sample key {self.key!r} is not of the form subset/00001234")
        if not self.messages:
            raise SkipSample("no_text", self.key)
        for kind, slot, given in (("image", IMAGE_SLOT, self.images), ("video", VIDEO_SLOT, self.videos)):
            slots = sum(m.text.count(slot) for m in self.messages)
            if slots != len(given):
                raise SkipSample(f"{kind}_count_mismatch", f"{slots} {kind} slots in the text but {len(given)} {kind}s")
        for video in self.videos:
            video.check()
        for message in self.messages:
            _check_text(message)
            _check_boxes(message, len(self.images))

    def digest(self, files: Sequence[str] | None = None) -> str:
        """Return 64 hex digits over messages, images and videos, not the key: equal for exact duplicates. A caller that
        has `file_digests(self)` gives them as `files`."""
        h = hashlib.sha256()
        for message in self.messages:
            h.update(f"{message.role}\0{message.text}\0".encode("utf-8", "surrogatepass"))
            if not message.is_learnt:
                h.update(b"given\0")
            if message.reasoning:
                h.update(f"thought\0{message.reasoning}\0".encode("utf-8", "surrogatepass"))
            if message.boxes:
                h.update(f"boxes\0{json.dumps(places_to_json(message.boxes))}\0".encode())
        if self.videos:
            h.update(f"videos\0{json.dumps([_times_of(video) for video in self.videos])}\0".encode())
        for digest in file_digests(self) if files is None else files:
            h.update(bytes.fromhex(digest))
        return h.hexdigest()


def file_digests(sample: Sample) -> list[str]:
    """Return 64 hex digits of SHA-256 for each of `sample.files`, in order: images first."""
    return [hashlib.sha256(file).hexdigest() for file in sample.files]


def _times_of(video: Video) -> dict[str, object]:
    """Return what a record says of a video beside its files."""
    times = {"start": video.start, "end": video.end, "timestamps": list(video.timestamps)}
    return {"files": len(video.files)} | {name: value for name, value in times.items() if value not in (None, [])}


def _check_text(message: Message) -> None:
    labels = [box.label for place in message.boxes for box in place.boxes]  # they are written in the text
    for text in (message.text, message.reasoning, *labels):
        if _CONTROL_CHARS.search(text):
            raise SkipSample("control_chars", repr(text[:80]))
    for text in (message.text, message.reasoning, *message.references, *labels):
        if _SURROGATES.search(text):
            raise SkipSample("schema_error", f"text that is not Unicode: {text[:80]!r}")
        if (found := _PLACEHOLDER.search(text.replace(IMAGE_SLOT, "").replace(VIDEO_SLOT, ""))) is not None:
            raise SkipSample(
                "special_token_in_text",
                f"{found[0]!r} stands for something that is not read; write {IMAGE_SLOT} at the place of each image, "
                f"{VIDEO_SLOT} at that of each video",
            )
    if not message.text.strip():
        if message.role == "assistant":
            raise SkipSample("empty_target", "an assistant turn is empty")
        raise SkipSample("empty_prompt", f"a {message.role} turn is empty")


def _check_boxes(message: Message, num_images: int) -> None:
    slots = message.text.count(BOX_SLOT)
    if slots != len(message.boxes):
        detail = f"{slots} places for boxes in the text, and boxes for {len(message.boxes)}"
        raise SkipSample("box_count_mismatch", detail)
    if any(BOX_SLOT in text for text in (message.reasoning, *message.references)):
        raise SkipSample("box_count_mismatch", "a place for boxes in the reasoning or in a reference, which have none")
    for place in message.boxes:
        if not 0 <= place.image < num_images:
            raise SkipSample("bad_box", f"boxes of image {place.image}, and the row has {num_images}")
        if fault := place.fault():
            raise SkipSample("bad_box", fault)
        for box in place.boxes:
            if any(
                mark in box.label for mark in (IMAGE_SLOT, VIDEO_SLOT, BOX_SLOT, "\n")
            ):  # it would change the text around it
                raise SkipSample("bad_box", f"a label with a slot or a line break: {box.label[:80]!r}")


def to_fields(sample: Sample, digests: Sequence[str] | None = None) -> dict[str, bytes]:
    """Return field name -> bytes. A field name is the member's name without the key and the dot after it. A caller that
    has `file_digests(sample)` gives them."""
    digests, named = file_digests(sample) if digests is None else digests, named_files(sample)
    files = [{"name": name, "sha256": digest} for name, digest in zip(named, digests, strict=True)]
    messages: list[dict[str, object]] = []
    for message in sample.messages:
        messages.append({"role": message.role, "text": message.text})
        if not message.is_learnt:
            messages[-1]["is_learnt"] = False
        if message.reasoning:
            messages[-1]["reasoning"] = message.reasoning
        if message.references:
            messages[-1]["references"] = list(message.references)
        if message.boxes:
            messages[-1]["boxes"] = places_to_json(message.boxes)
    record: dict[str, object] = {
        "messages": messages,
        "images": files[: len(sample.images)],
        "digest": sample.digest(digests),
    }
    if sample.videos:
        record["videos"] = video_records(sample, files)
    text = json.dumps(record, ensure_ascii=False, sort_keys=True)
    return {"json": text.encode(), **named}


def named_files(sample: Sample) -> dict[str, bytes]:
    """Return field name -> bytes of each of `sample.files`, in order."""
    names = [f"{i}.{_extension(image)}" for i, image in enumerate(sample.images)]
    for i, video in enumerate(sample.videos):
        names += [f"video{i}.{f'{j:05d}.' if video.frames else ''}{_extension(f)}" for j, f in enumerate(video.files)]
    return dict(zip(names, sample.files, strict=True))


def video_records(sample: Sample, files: Sequence[Mapping[str, str]]) -> list[dict[str, object]]:
    """Return the record of each video, for `video_of`. `files` are what is known of each of `sample.files`, its field
    name among it."""
    rest = iter(files[len(sample.images) :])
    return [_times_of(video) | {"files": [next(rest) for _ in video.files]} for video in sample.videos]


def from_fields(key: str, fields: Mapping[str, bytes | memoryview]) -> Sample:
    """Return the sample of these fields. Inverse of `to_fields`."""
    record = json.loads(bytes(fields["json"]))
    tuples = {"references": tuple, "boxes": places_from_json}
    messages = [
        {name: tuples[name](value) if name in tuples else value for name, value in message.items()}
        for message in record["messages"]
    ]
    return Sample(
        key=key,
        messages=tuple(Message(**message) for message in messages),
        images=tuple(bytes(fields[image["name"]]) for image in record["images"]),
        videos=tuple(video_of(video, fields) for video in record.get("videos", ())),
    )


def video_of(record: Mapping[str, Any], fields: Mapping[str, bytes | memoryview]) -> Video:
    files = tuple(bytes(fields[file["name"]]) for file in record["files"])
    times = {"start": record.get("start"), "end": record.get("end")}
    # A list of frames may have one frame, and a file has no timestamps of its own in the record.
    if "timestamps" in record:
        return Video(frames=files, timestamps=tuple(record["timestamps"]), **times)
    return Video(data=files[0], **times)


def _extension(file: bytes) -> str:
    if file[4:8] == b"ftyp" and file[8:12] not in (b"avif", b"avis", b"mif1", b"heic"):
        return "mp4"
    if file[:4] == b"RIFF" and file[8:12] in (b"WEBP", b"AVI "):
        return "webp" if file[8:12] == b"WEBP" else "avi"
    return next((ext for magic, ext in _MAGIC.items() if file.startswith(magic)), "bin")
