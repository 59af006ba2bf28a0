"""Existing WebDataset tars -> Sample, by a mapping of their members.

The source is a directory of `<subset>/*.tar`, or of tars (`cc3m-00000.tar`, `00000.tar`). A sample is a run of
neighbouring members with the same name up to the first dot after the last slash. The field is the text after that dot:

    000000012.jpg  000000012.txt  000000012.json          one image
    pets/7.0.png   pets/7.1.png   pets/7.json             two images, in order of their fields

becomes, with {question: "constant:Describe the picture.", answer: txt},

    Sample(key="cc3m/00000012", images=(b"\\xff\\xd8\\xff...",), messages=(
        user "<image>Describe the picture.", assistant "A dog in the snow."))

A member mp4, webm, mkv or of another suffix of videos is a video, with `<video>` before the question:
`000000012.mp4  000000012.txt`.

With {messages: "json:messages"}, the conversation is in a field of the JSON member, in OpenAI's or ShareGPT's form (see
conversation.py). Its images and videos are the sample's members in order. A content part may also name
a member's field.

`question`, `answer` and `messages` specify a value: `txt`, the text of a member; `json:a.b.0`, a value inside a JSON
member; `constant:...`, this text itself. Members that no option names are skipped, and so are directories and hidden
files. The key is the number of the sample in its subset. The tar's own names appear only in the quarantine.

Nothing is unpacked to a disk: list_parts reads the headers, and iter_part reads the members that the options name.

Left out: a sample without an image or a video, unless `text_only` is set (image_not_found); a sample without the member
or field of a text, or whose image, video or text is a link, a pipe or a device (schema_error); a JSON member that is
not JSON (json_parse_error); a JSON member or an image of zero bytes (empty); the same member twice (duplicate_key); a
member whose name is only a field, `.txt` (no_name); an image over 256 MiB, a video over 2 GiB (bomb); and all that the
conversation's form or Sample.check refuses. A tar that is cut short is refused.
"""

import re
from collections.abc import Container, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import Field, field_validator, model_validator

from dataset_builders.contracts.sample import Sample, SkipSample
from dataset_builders.readers.box_places import BoxOptions
from dataset_builders.readers.conversation import Conversation, check_unread, from_openai, from_sharegpt, names_files
from dataset_builders.readers.parts import Builder, Part, SkippedRow, natural_order
from dataset_builders.readers.source_files import IMAGE_SUFFIXES, VIDEO_SUFFIXES, row_parts, span_parts, subset_patterns
from dataset_builders.readers.tar_files import Group, iter_groups, list_group_spans
from dataset_builders.readers.text_files import json_type, parse_json
from dataset_builders.readers.video_refs import VideoOptions, VideoRef, video_ref
from dataset_builders.storage.store import StorePath

_SUFFIXES = (".tar",)
_CONSTANT = "constant:"
_MAX_TEXT_BYTES = 64 << 20


class WebDatasetOptions(BoxOptions, VideoOptions):
    """The roles of a sample's members."""

    images: tuple[str, ...] = Field(
        default=IMAGE_SUFFIXES,
        description="fields that are images: jpg also stands for 0.jpg, 1.jpg, ...; with * a pattern of fields",
    )
    videos: tuple[str, ...] = Field(
        default=VIDEO_SUFFIXES, description="fields that are videos, in the same way: mp4 also stands for 0.mp4, 1.mp4"
    )
    question: str | None = Field(default=None, description="where the question is: txt, json:a.b or constant:text")
    answer: str | None = Field(default=None, description="where the answer is, in the same way")
    messages: str | None = Field(default=None, description="instead of the two, where a conversation is: json:a.b")
    text_only: bool = Field(
        default=False, description="whether samples without an image or a video are meant to be there"
    )

    @field_validator("question", "answer", "messages")
    @classmethod
    def _names_a_member(cls, place: str | None) -> str | None:
        if place is not None and not place.partition(":")[0]:
            raise ValueError(f"{place!r} names no member; write txt, json:field or constant:text")
        return place

    @model_validator(mode="after")
    def _say_where_the_text_is(self) -> "WebDatasetOptions":
        pair = (self.question, self.answer)
        if (self.messages is None) == (pair == (None, None)) or (self.messages is None and None in pair):
            raise ValueError("give question and answer, or messages alone")
        if self.messages is not None and self.messages.startswith(_CONSTANT):
            raise ValueError("messages cannot be a constant; name a JSON member: json:messages")
        return self


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """Return globs of the tars of these subsets; no subset means all."""
    return subset_patterns(subsets, _SUFFIXES)


def list_parts(source: StorePath, subsets: Sequence[str], options: WebDatasetOptions) -> list[Part]:
    """Return all parts of the source: subsets by name, tars in numeric order, samples in the order of the tar."""
    return row_parts(
        source, subsets, _SUFFIXES, lambda tar, subset: span_parts(tar, subset, list_group_spans(tar.path))
    )


def iter_part(
    part: Part, options: WebDatasetOptions, rows: Container[int] | None = None
) -> Iterator[Sample | SkippedRow]:
    """Yield samples and unusable rows of one part, in order. One sample is in memory at a time."""
    for row, group in enumerate(iter_groups(part.path, part.span), part.first_row):
        if rows is not None and row not in rows:
            continue
        try:
            yield _sample(part.key(row), group, options)
        except SkipSample as skip:
            named = f"{group.name[:100]!r}: " if group.name else ""
            yield SkippedRow(part.key(row), skip.reason, f"{named}{skip.detail}")


BUILDER = Builder(options=WebDatasetOptions, patterns=patterns, list_parts=list_parts, iter_part=iter_part)


def _sample(key: str, group: Group, options: WebDatasetOptions) -> Sample:
    group.check()
    names = sorted(group.fields, key=natural_order)
    fields = [field for field in names if _is_one_of(field, options.images)]
    clips = [video_ref(field, field, None) for field in names if _is_one_of(field, options.videos)]
    if not fields and not clips and not options.text_only:
        raise SkipSample("image_not_found", f"no image or video among its members: {_names(group)}")

    def read(field: str, max_bytes: int) -> bytes:
        if field not in group.fields:
            raise SkipSample("image_not_found", f"no member {field[:100]!r}")
        return group.read(field, max_bytes, "bomb")

    texts = _Texts(group)
    if options.messages is None:
        question, answer = texts.text(options.question), texts.text(options.answer)
        texts.check_unread((options.question, options.answer))
        turns = [{"from": "user", "value": question}, {"from": "assistant", "value": answer}]
        return from_sharegpt({"conversations": turns}, fields, clips).sample(key, read, options)
    return _conversation(texts.value(options.messages), fields, clips, options).sample(key, read, options)


def _conversation(
    value: Any, fields: Sequence[str], clips: Sequence[VideoRef], options: WebDatasetOptions
) -> Conversation:
    """Return the conversation of a list of turns, or of an object that holds one as `messages` or `conversations`."""
    if isinstance(value, list):
        is_sharegpt = bool(value) and isinstance(value[0], dict) and "from" in value[0]
        value = {"conversations" if is_sharegpt else "messages": value}
    if not isinstance(value, dict):
        raise SkipSample("schema_error", f"the conversation is {json_type(value)}, not an array")
    if value.get("conversations"):
        return from_sharegpt(value, fields, clips)
    turns = value.get("messages")
    # Content parts that name a member's field take no image by its order.
    is_named = isinstance(turns, list) and names_files(turns)
    return from_openai(value, *((None, None) if is_named else (fields, clips)), options.frame_rate)


def _is_one_of(field: str, kinds: Sequence[str]) -> bool:
    plain = re.sub(r"^\d+\.", "", field)  # 0.jpg is also a jpg
    return any(fnmatchcase(field, kind) if "*" in kind else kind == plain for kind in kinds)


def _names(group: Group) -> str:
    return ascii(", ".join(group.fields)[:100])


class _Texts:
    """The values that the options name in one sample. A JSON member is parsed once."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parsed: dict[str, Any] = {}

    def text(self, place: str) -> str:
        """Return the text that an option names."""
        if place.startswith(_CONSTANT):
            return place.removeprefix(_CONSTANT)
        value = self.value(place) if ":" in place else self._member(place)
        if not isinstance(value, str):
            raise SkipSample("schema_error", f"{place!r} is {json_type(value)}, not text")
        return value

    def value(self, place: str) -> Any:
        """Return the JSON value at `member` or `member:a.b.0`."""
        member, _, path = place.partition(":")
        if member not in self._parsed:
            text = self._member(member)
            if not text:
                raise SkipSample("empty", f"the member {member!r} has zero bytes")
            self._parsed[member] = parse_json(text)
        value = self._parsed[member]
        for name in path.split(".") if path else ():
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            elif isinstance(value, dict) and name in value:
                value = value[name]
            else:
                raise SkipSample("schema_error", f"nothing at {place!r}")
        return value

    def check_unread(self, places: Sequence[str]) -> None:
        """Raise SkipSample if a key of a JSON member that these places do not name would change what is trained."""
        for member, value in self._parsed.items():
            if isinstance(value, dict):
                read = [place.removeprefix(f"{member}:").partition(".")[0] for place in places]
                check_unread(value, read, has_images=True)

    def _member(self, field: str) -> str:
        if field not in self._group.fields:
            raise SkipSample("schema_error", f"no member {field!r} among {_names(self._group)}")
        try:
            return self._group.read(field, _MAX_TEXT_BYTES, "schema_error").decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SkipSample("schema_error", f"{field!r} is not UTF-8: {error.reason} at byte {error.start}") from None
