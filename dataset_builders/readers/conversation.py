"""Conversations in the forms of other tools: OpenAI's messages and ShareGPT's conversations -> messages and files.

There are two ways to mark the position of an image or a video. The row's fields decide which one applies, not its text:

    content parts   {"type": "image_url", "image_url": {"url": ...}}   the part names its image; a part without a
                    {"type": "image"}                                  name takes the next image of the images field
                    {"type": "video", "video": ...}                    and so for videos (video_refs.py)
    marks           "What is <image> and <image>?", "<video>"          only where the row has a field of images or
                                                                       videos and no content part is one

If there are no marks at all, images and then videos come before the first user's text, as in the tools that write such
rows. Where a row has videos and no image, `<image>` marks a video, as LLaVA writes it. In all other cases a literal
`<image>` or `<video>` is refused (special_token_in_text), since it would become a slot. Numbered marks, such as
`<image 2>` or `<image_2>`, are read where each of the row's images has one (see `place_numbered`).

Most keys that no option reads do no harm and are only named, but some would change what is trained. A row is left out,
with the key and the way out in its reason, where such a key holds

    an image                          {"messages": [...], "thumbnail_image": "1.png"} where no image is read
    a mark that it is not to train    {"trainable": false}, {"label": false}, {"rejected": true}
    the other half of a preference    {"rejected": "A worse answer."}
    places in the image               {"objects": {"bbox": [[1, 2, 3, 4]]}} where no `<bbox>` uses them
    what else the model would get     tools, audio; videos where none are read

The marks of single answers are read here, too. Sample.check refuses placeholders in texts. ms-swift's `<bbox>` and
`<ref-object>`, and boxes that texts write themselves, become places of boxes (`box_places.py`).
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, Role, Sample, SkipSample
from dataset_builders.readers.box_places import BoxOptions, Images, place_objects, with_boxes
from dataset_builders.readers.image_refs import MAX_IMAGE_BYTES
from dataset_builders.readers.parts import SPLIT_NAMES, split_of
from dataset_builders.readers.source_files import IMAGE_SUFFIXES
from dataset_builders.readers.text_files import json_type, parse_json
from dataset_builders.readers.video_refs import (
    VIDEO_NAMES,
    Read,
    VideoRef,
    is_named,
    looks_like_video,
    video_ref,
)

ImageRef = str | bytes | None  # an image's name, its bytes, or None: the next image of the row's images field

OPENAI_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
SHAREGPT_ROLES: Mapping[str, Role] = {
    **OPENAI_ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image", "image_url", "input_image")
_VIDEO_PARTS = ("video", "video_url", "input_video")
_PART_NAMES = ("image_url", "image", "url", "path")
_VIDEO_PART_NAMES = ("video_url", "video", "frames", "url", "path")
ROW_KEYS = ("messages", "conversations", "system", "objects")
_TURN_KEYS = ("role", "from", "content", "value", "name", "weight", "loss")
_CALLS = ("tool_calls", "function_call")
_REASONING = ("reasoning_content", "reasoning")  # the older and the newer name in servers that follow OpenAI's protocol
_THINK, _END_OF_THINK = "<think>", "</think>"
# Names that people and tools give to a row's image or images, the most usual ones first.
IMAGE_NAMES = (
    *("image", "images", "img", "imgs", "picture", "pictures", "photo", "photos", "image_path", "image_paths"),
    *("img_path", "img_paths", "image_file", "image_files", "image_url", "image_urls", "file_name", "filename"),
    *("bild", "bilder", "foto", "imagen"),
)
_IMAGE_WORDS = frozenset(("image", "images", "img", "imgs", "picture", "pictures", "pic", "pics", "photo", "photos"))
_IMAGE_WORDS |= {"bild", "bilder", "foto", "fotos", "imagen", "imagenes"}
_NOTHING = (None, "", [], {}, "[]")  # "[]": LLaMA-Factory's tools are a text
_NO_PART = ("tools", "functions", "videos", "video", "audios", "audio", "objects")  # of the model's input, when read
# Words of keys that say whether to train, by true or false.
_OF_TRAINING = frozenset(
    ("train", "training", "trainable", "learn", "learnable", "loss", "weight", "supervise", "supervised")
)
_GOOD = _OF_TRAINING | {"label", "correct", "accepted", "approved", "good", "valid", "keep"}
_BAD = frozenset(("masked", "mask", "ignore", "ignored", "skip", "skipped", "exclude", "excluded", "wrong", "bad"))
_BAD |= {"invalid", "flagged", "deleted", "rejected", "corrupt", "corrupted"}
_OF_LISTS = _OF_TRAINING | {"weights"}  # a list has a mark for each message
_OF_NUMBERS = _OF_TRAINING | {"masked"}  # 1 and 0 say true and false
_WATCHED = _IMAGE_WORDS | _OF_LISTS | _GOOD | _BAD | {"chosen"}
_NUMBERED = re.compile(r"<\|?image[ _-]?(\d+)\|?>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A row's messages with a slot for each image, and the references to the images in order of the slots."""

    messages: tuple[Message, ...]
    refs: tuple[ImageRef, ...]
    videos: tuple[VideoRef, ...] = ()
    objects: Any = None  # of ms-swift: the boxes and names of the marks in the texts

    def sample(self, key: str, read: Read, boxes: BoxOptions) -> Sample:
        """Read images and videos, and return the sample; SkipSample if they cannot be read, or this is no
        conversation."""
        _check_order([message.role for message in self.messages])
        for message in self.messages:
            for slot in (IMAGE_SLOT, VIDEO_SLOT):
                if message.role != "user" and slot in message.text:
                    raise SkipSample("special_token_in_text", f"{slot} in a message of {message.role}")

        @cache
        def image(number: int) -> bytes:
            ref = self.refs[number]
            return ref if isinstance(ref, bytes) else read(ref, MAX_IMAGE_BYTES)

        images = Images(image, len(self.refs), boxes.boxes_of)
        messages = with_boxes(place_objects(self.messages, self.objects, images), images, boxes)
        # Checked before a file is read, other than images with boxes.
        known = tuple(video.check() for video in self.videos)
        Sample(key=key, messages=messages, images=(b"",) * len(self.refs), videos=known).check()
        videos = tuple(video.video(read) for video in self.videos)
        return Sample(key=key, messages=messages, images=tuple(map(image, range(len(self.refs)))), videos=videos)


def from_openai(
    record: Mapping[str, Any],
    images: Sequence[ImageRef] | None,
    videos: Sequence[VideoRef] | None = None,
    frame_rate: float | None = None,
) -> Conversation:
    """Return the conversation of a row with `messages`, a list of {"role", "content"}; SkipSample if it has none.

    Args:
        images: the row's images field; None if the row has no such field.
        videos: the same of its videos.
        frame_rate: of lists of frames in content parts that state none.
    """
    turns = _turns(record, "messages", "conversations")
    has_parts = any(_kind_of_part(part) for turn in turns for part in _parts(turn))
    has_marks = (images is not None or videos is not None) and not has_parts
    messages, refs, clips = [], [], []
    for i, turn in enumerate(turns):
        where = f"messages[{i}]"
        role = _role(turn.get("role"), OPENAI_ROLES, where)
        if any(turn.get(field) for field in _CALLS):
            raise SkipSample("bad_role", f"{where} calls a tool")
        text, own, own_clips = _content(turn.get("content"), role, has_marks, f"{where}.content", frame_rate)
        messages.append(_message(turn, role, text, where))
        refs += own
        clips += own_clips
    messages = _with_system(record, messages)
    if has_marks:
        return _checked(record, _with_marks(messages, images or (), videos or ()))
    files = _fill("image", refs, images or ()), _fill("video", clips, videos or ())
    return _checked(record, Conversation(tuple(messages), *files))


def from_sharegpt(
    record: Mapping[str, Any], images: Sequence[ImageRef], videos: Sequence[VideoRef] = ()
) -> Conversation:
    """Return the conversation of a row with `conversations`, a list of {"from", "value"}. Raises as `from_openai`."""
    messages = []
    for i, turn in enumerate(_turns(record, "conversations", "messages")):
        where = f"conversations[{i}]"
        role = _role(turn.get("from"), SHAREGPT_ROLES, where)
        text = _text(turn.get("value"), f"{where}.value")
        messages.append(_message(turn, role, text, where))
    return _checked(record, _with_marks(_with_system(record, messages), images, videos))


def images_of(record: Mapping[str, Any]) -> list[ImageRef] | None:
    """Return the images of a row, a list or a single image: `image` or `images`, else another of IMAGE_NAMES.

    An image is a text with its name, or an object with its `bytes`, `path` or `url`. None: the row has no such field,
    or only null. SkipSample is raised for another type, and for two such fields.
    """
    present = [field for field in IMAGE_NAMES if record.get(field) is not None]
    present = [field for field in present if field in ("image", "images")] or present
    if len(present) > 1:
        raise SkipSample("schema_error", f"both {present[0]!r} and {present[1]!r}: which are the row's images?")
    if not present:
        return None
    value = record[present[0]]
    items = value if isinstance(value, list) else [value]
    return [_image(item, f"{present[0]}[{i}]") for i, item in enumerate(items)]


def names_files(turns: Sequence[Any]) -> bool:
    """Whether a content part of these messages names its image or video."""
    parts = [part for turn in turns if isinstance(turn, Mapping) for part in _parts(turn) if _kind_of_part(part)]
    return any(part.get(name) is not None for part in parts for name in (*_PART_NAMES, *_VIDEO_PART_NAMES))


def unread_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of rows, and of their turns as `messages[].key`, that are not read."""
    rows = list(rows)
    names = unread_keys(rows, ("id", *ROW_KEYS, *IMAGE_NAMES, *VIDEO_NAMES))
    for field in ("messages", "conversations"):
        lists = [row[field] for row in rows if isinstance(row.get(field), list)]
        turns = [turn for turns in lists for turn in turns if isinstance(turn, dict)]
        names += [f"{field}[].{name}" for name in unread_keys(turns, (*_TURN_KEYS, *_REASONING, *_CALLS))]
    return names


def answer_of(text: str, **fields: Any) -> Message:
    """Return an answer; a block `<think>...</think>` at the start of its text is its reasoning."""
    thought, end, rest = text.removeprefix(_THINK).partition(_END_OF_THINK)
    if text.startswith(_THINK) and end:
        fields |= {"reasoning": thought.strip()}
        text = rest.strip()
    return Message(role="assistant", text=text, **fields)


def place_numbered(texts: Sequence[str], images: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Return a user's texts with slots for marks like `<image 2>`, and the images in the order of the slots.

    The marks are read if each image has exactly one, numbered from 1 or from 0; else texts and images are unchanged.
    """
    numbers = [int(number) for text in texts for number in _NUMBERED.findall(text)]
    first = min(numbers, default=0)
    is_whole = first in (0, 1) and sorted(numbers) == list(range(first, first + len(images)))
    if not numbers or not is_whole or any(IMAGE_SLOT in text for text in texts):
        return list(texts), list(images)
    return [_NUMBERED.sub(IMAGE_SLOT, text) for text in texts], [images[number - first] for number in numbers]


def _checked(record: Mapping[str, Any], found: Conversation) -> Conversation:
    """Return the conversation with the row's objects; SkipSample for another key that would change what is trained."""
    # Where a video is read, another key often names the same file.
    check_unread(record, (*ROW_KEYS, *(VIDEO_NAMES if found.videos else ())), bool(found.refs or found.videos))
    for name in SPLIT_NAMES:
        if isinstance(record.get(name), str) and split_of(record[name]) == "heldout":
            detail = (
                f"{name!r} is {record[name]!r}, and no option reads it; write a file for each split, without this key"
            )
            raise SkipSample("schema_error", detail)
    return replace(found, objects=record.get("objects"))


def _turns(record: Mapping[str, Any], field: str, other: str) -> list[dict[str, Any]]:
    if record.get(other) not in (None, "", [], "[]"):
        raise SkipSample("schema_error", f"the row has {other!r} beside {field!r}; remove one of the two")
    turns = record.get(field)
    turns = parse_json(turns) if isinstance(turns, str) else turns  # a table may hold the list as JSON text
    if not isinstance(turns, list):
        raise SkipSample("schema_error", f"{field!r} is {json_type(turns)}, not an array")
    if not turns:
        raise SkipSample("no_text", f"{field!r} is empty")
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise SkipSample("schema_error", f"{field}[{i}] is {json_type(turn)}, not an object")
    return turns


def _role(name: Any, roles: Mapping[str, Role], where: str) -> Role:
    if not isinstance(name, str):
        raise SkipSample("schema_error", f"the role of {where} is {json_type(name)}, not text")
    if name not in roles:
        raise SkipSample("bad_role", f"{where} is of {name[:40]!r}; known: {', '.join(roles)}")
    return roles[name]


def _check_order(roles: Sequence[Role]) -> None:
    """Check that only the first role may be system, each answer follows a question, and an answer is last."""
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        raise SkipSample("bad_role", "a system message that is not the first one")
    for i, role in enumerate(turns):
        if role == "assistant" and (i == 0 or turns[i - 1] == "assistant"):
            raise SkipSample("bad_role", f"answer {i} follows {'another answer' if i else 'no question'}")
    if not turns or turns[-1] != "assistant":
        raise SkipSample("bad_role", "the last message is no answer")


def _message(turn: Mapping[str, Any], role: Role, text: str, where: str) -> Message:
    """Return a message; an answer has its reasoning, from a field of the turn or from a think block before its text."""
    if role != "assistant":
        return Message(role=role, text=text)
    fields = [field for field in _REASONING if turn.get(field)]
    if not fields:
        return answer_of(text, is_learnt=is_learnt(turn, where))
    reasoning = _text(turn[fields[0]], f"{where}.{fields[0]}")
    return Message(role=role, text=text, is_learnt=is_learnt(turn, where), reasoning=reasoning)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise SkipSample("schema_error", f"{where} is {json_type(value)}, not text")
    return value.replace("\r\n", "\n").strip()


def _parts(turn: Mapping[str, Any]) -> list[Any]:
    content = turn.get("content")
    return content if isinstance(content, list) else []


def _kind_of_part(part: Any) -> str:
    """Return `image` or `video` for a content part that is one; empty for others."""
    kind = part.get("type") if isinstance(part, dict) else None
    return "image" if kind in _IMAGE_PARTS else "video" if kind in _VIDEO_PARTS else ""


def _content(
    content: Any, role: Role, has_marks: bool, where: str, frame_rate: float | None
) -> tuple[str, list[ImageRef], list[VideoRef | None]]:
    """Return the text of a message, with slots in it, and the references to the images and videos of these slots."""
    pieces: list[str] = []
    refs: list[ImageRef] = []
    videos: list[VideoRef | None] = []
    for i, part in enumerate(content if isinstance(content, list) else [{"type": "text", "text": content}]):
        place = f"{where}[{i}]" if isinstance(content, list) else where
        if not isinstance(part, dict):
            raise SkipSample("schema_error", f"{place} is {json_type(part)}, not an object")
        if kind := _kind_of_part(part):
            if role != "user":
                raise SkipSample("schema_error", f"{place}: a {kind} in a message of {role}")
            pieces.append(IMAGE_SLOT if kind == "image" else VIDEO_SLOT)
            names = [name for name in (_PART_NAMES if kind == "image" else _VIDEO_PART_NAMES) if part.get(name)]
            if kind == "image":
                refs.append(_image(part[names[0]], place) if names else None)
            else:
                about = {name: each for name, each in part.items() if name not in ("type", *_VIDEO_PART_NAMES)}
                videos.append(video_ref({**about, "path": part[names[0]]}, place, frame_rate) if names else None)
            continue
        if part.get("type") not in _TEXT_PARTS:
            raise SkipSample(
                "schema_error", f"{place} has the type {str(part.get('type'))[:40]!r}, no text, image or video"
            )
        text = part.get("text")
        if not isinstance(text, str):
            raise SkipSample("schema_error", f"{place} is {json_type(text)}, not text")
        pieces.append(text)
    # Counted after joining, because two parts can form a mark together.
    for slot, own in ((IMAGE_SLOT, refs), (VIDEO_SLOT, videos)):
        if not has_marks and "".join(pieces).count(slot) != len(own):
            raise SkipSample("special_token_in_text", f"{slot} in {where}")
    return _text("".join(pieces), where), refs, videos


def _image(value: Any, where: str) -> str | bytes:
    if isinstance(value, Mapping):
        names = [value[name] for name in ("bytes", "url", "path", "image") if value.get(name) is not None]
        value = names[0] if names else None
    if not isinstance(value, str | bytes):
        raise SkipSample("schema_error", f"{where}: {json_type(value)} where an image's name should be")
    return value


def _with_system(record: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """Return the messages, with a row's own `system` field as the first one."""
    if record.get("system") in (None, ""):
        return messages
    if messages[0].role == "system":
        raise SkipSample("schema_error", "both a 'system' field and a system message")
    return [Message(role="system", text=_text(record["system"], "system")), *messages]


def _with_marks(messages: Sequence[Message], images: Sequence[ImageRef], videos: Sequence[VideoRef]) -> Conversation:
    """Return the conversation with slots at the marks; without marks, the slots come before the first user's text."""
    messages = list(messages)
    asked = [i for i, message in enumerate(messages) if message.role == "user"]
    texts, images = place_numbered([messages[i].text for i in asked], images)
    if videos and not images and not any(VIDEO_SLOT in text for text in texts):
        texts = [text.replace(IMAGE_SLOT, VIDEO_SLOT) for text in texts]
    others = [message.text for message in messages if message.role != "user"]
    if texts and not any(slot in text for text in [*texts, *others] for slot in (IMAGE_SLOT, VIDEO_SLOT)):
        texts[0] = IMAGE_SLOT * len(images) + VIDEO_SLOT * len(videos) + texts[0]
    for i, text in zip(asked, texts):
        messages[i] = Message(role="user", text=text)
    return Conversation(tuple(messages), tuple(images), tuple(videos))


def _fill(kind: str, refs: Iterable[Any], given: Sequence[Any]) -> tuple[Any, ...]:
    """Replace each None by the next image or video of the row's own field, in order. Every one must be used."""
    refs, rest = list(refs), list(given)
    num_open = sum(ref is None for ref in refs)
    if num_open != len(rest):
        raise SkipSample(
            f"{kind}_count_mismatch", f"{num_open} {kind} parts without a name, {len(rest)} {kind}s beside the messages"
        )
    return tuple(rest.pop(0) if ref is None else ref for ref in refs)


@lru_cache(1024)
def words_of_key(name: str) -> frozenset[str]:
    """Return the words of a key in lower case: trainOnTurn and train_on_turn both have three."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name))


def check_unread(row: Mapping[str, Any], read: Container[str], has_images: bool) -> None:
    """Raise SkipSample (schema_error) if a key of a row that is not in `read` would change what is trained."""
    for name, value in row.items():
        if name in read or _is_nothing(value):
            continue
        plain, words = name.lower(), words_of_key(name)
        if plain in _NO_PART and value is not False:
            raise SkipSample(
                "schema_error", f"the row has {name!r}, which is not read; remove it if its answers do not need it"
            )
        # Where an image of the row is read, another key often names the same image.
        if not has_images and (plain in IMAGE_NAMES or (words & _IMAGE_WORDS and looks_like_image(value))):
            raise SkipSample("schema_error", f"the row has {name!r}, and no image is read; name it image, or remove it")
        if not has_images and plain in VIDEO_NAMES and looks_like_video(value):
            raise SkipSample("schema_error", f"the row has {name!r}, and no video is read; name it video, or remove it")
        if words & {"chosen", "rejected"} and not isinstance(value, bool):
            raise SkipSample(
                "schema_error",
                f"the row has {name!r}, data of preferences; remove it, and name the better answer as the answer",
            )
        if (isinstance(value, list) and words & _OF_LISTS) or _trains(name, value) is False:
            raise SkipSample(
                "schema_error",
                f"{name!r} is {repr(value)[:40]}, so not all of the row is to be trained on; remove key or row",
            )


def is_watched(name: str) -> bool:
    """Whether `check_unread` may refuse a row for a key of this name."""
    return name.lower() in (*IMAGE_NAMES, *VIDEO_NAMES, *_NO_PART, *SPLIT_NAMES) or bool(words_of_key(name) & _WATCHED)


def looks_like_image(value: Any) -> bool:
    """Whether a value is an image, the name or address of one, or a list of these."""
    if isinstance(value, list):
        return bool(value) and all(map(looks_like_image, value))
    if isinstance(value, dict):
        return isinstance(value.get("bytes"), bytes) or looks_like_image(value.get("path") or value.get("url"))
    if isinstance(value, str):
        return is_named(value, "data:image/", IMAGE_SUFFIXES)
    return isinstance(value, bytes) and not looks_like_video(value)


def unread_keys(rows: Iterable[Mapping[str, Any]], read: Container[str]) -> list[str]:
    """Return the keys of rows that hold something and are not read, each once, in order."""
    return list(dict.fromkeys(name for row in rows for name in row if name not in read and not _is_nothing(row[name])))


def is_learnt(turn: Mapping[str, Any], where: str) -> bool:
    """Return whether an answer is trained on, by the marks that tools write beside it: OpenAI's `weight`, ms-swift's
    `loss`, Axolotl's `train` and `training`, and all other keys with a word of _OF_TRAINING, _GOOD or _BAD."""
    marks = {name: value for name, value in turn.items() if value is not None}
    for name, value in marks.items():
        # `mask` means opposite things in different tools.
        if name == "mask" or (_trains(name, value) is None and words_of_key(name) & _OF_NUMBERS):
            raise SkipSample(
                "schema_error", f"{where}.{name} is {str(value)[:40]!r}, neither 0 nor 1; write loss: true or false"
            )
    return not any(_trains(name, value) is False for name, value in marks.items())


def _is_nothing(value: Any) -> bool:
    return isinstance(value, (str, list, dict, type(None))) and value in _NOTHING


def _trains(name: str, value: Any) -> bool | None:
    """Return whether a key and its value say that something is trained on; None if they do not speak of it."""
    words = words_of_key(name)
    is_mask = {"loss", "mask"} <= words  # of what counts, in all tools
    is_good, is_bad = bool(words & _GOOD), bool(words & _BAD) and not is_mask
    if not is_good and not is_bad:
        return None
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        value = value.strip().lower() == "true"
    is_number = isinstance(value, int | float) and value in (0, 1) and bool(words & _OF_NUMBERS)
    if not isinstance(value, bool) and not is_number:
        return None
    return bool(value) != (is_bad or bool(words & {"no", "not"}))
