"""Rows of conversations -> Sample: OpenAI's messages, as builder `openai_messages`, and ShareGPT's or LLaVA's
conversations, as builder `llava`.

The rows are JSON lines, a JSON array, parquet or Arrow. In a table, a column of messages is a list of structs or JSON
text. Columns of Arrow's type `arrow.json` are parsed; the library datasets uses this type for a content that is text in
one row and a list in another.

openai_messages
---------------
The source is a directory of `<subset>/*.jsonl` or `<subset>.jsonl`; `.json` and `.parquet` too. A raw row of OpenAI's
fine-tuning format, which SkyRL's converter of the_cauldron writes with {"type": "image", "image": "data:..."} parts:

    {"messages": [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [
            {"type": "text", "text": "Is "},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0..."}},
            {"type": "text", "text": " a cat?"}]},
        {"role": "assistant", "content": "Yes", "weight": 1}]}

becomes

    Sample(key="pets/00000012", images=(b"\\x89PNG...",), messages=(
        system "Answer in one word.", user "Is <image> a cat?", assistant "Yes"))

A row of ms-swift or LLaMA-Factory, with its images in a separate field and marks in the text, becomes the same sample.
Without any mark, the images come before the first question. TRL's {"type": "image"} parts, which name no image, take
the images of that field in order:

    {"messages": [{"role": "user", "content": "Is <image> a cat?"}, {"role": "assistant", "content": "Yes"}],
     "images": ["pictures/1.png"]}

A video is a content part or an item of `videos`, in one of the forms of `video_refs.py`, and `<video>` marks it.

The role `developer` is read as `system`. Parts of a text are joined without a separator. An answer with weight 0
(ms-swift: loss false, and other marks, see conversation.py) is context and is not trained on. An answer's reasoning is
in `reasoning_content` (or `reasoning`), or in a block `<think>...</think>` at the start of its text. Texts are
stripped, and CRLF becomes LF. An image is a data URI, a path relative to the file or to `image_root`, or an object's
address (see image_refs.py). Of other fields, those that would change what is trained leave the row out
(conversation.py).

Left out: a line that is not JSON (json_parse_error); fields of another type, an image in an answer, tools or audio in
the row (schema_error); tool calls, tool and function roles, an answer that follows no question, a system
message that is not first, no answer at the end (bad_role); a literal `<image>` that is not a mark
(special_token_in_text); a missing image (image_not_found); and all that Sample.check refuses.

llava
-----
The source is a directory of `<subset>.json` or `<subset>/*.json`, each an array of rows; `.jsonl` and `.parquet` are
read too. A raw row:

    {"id": "000000033471", "image": "coco/train2017/000000033471.jpg",
     "conversations": [{"from": "human", "value": "<image>\\nWhat are the colors of the bus?"},
                       {"from": "gpt", "value": "White and red."}]}

becomes

    Sample(key="llava_mix/00000012", images=(b"\\xff\\xd8\\xff...",), messages=(
        user "<image>\\nWhat are the colors of the bus?", assistant "White and red."))

`image`, or `images` as in LLaMA-Factory, is an image or a list of images. An image is a path relative to the file or to
`image_root`, a data URI, or an object's address (see image_refs.py). `video` or `videos` name videos in the same way
(video_refs.py); in a row with videos and without images, `<image>` marks a video. Slots are at the marks; in a row
without marks, the slots come first. A `system` field, or a first turn from system, is the system message. The role
`user` is read like `human`, and `assistant`, `chatgpt` and `model` like `gpt`. The key is the row's number, so an `id`
may occur twice. Texts are stripped, and CRLF becomes LF.

Left out: a number of marks that differs from the number of images (image_count_mismatch), two consecutive answers or a
question at the end (bad_role), an empty answer (empty_target), a missing image (image_not_found), turns of another
shape (schema_error), and all that Sample.check refuses.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from dataset_builders.contracts.sample import Sample, SkipSample
from dataset_builders.readers.box_places import BoxOptions
from dataset_builders.readers.conversation import (
    ROW_KEYS,
    Conversation,
    from_openai,
    from_sharegpt,
    images_of,
    is_watched,
)
from dataset_builders.readers.image_refs import MEDIA_PATTERNS, ImageReader, ImageRefOptions, check_image_root
from dataset_builders.readers.parts import Builder, Part, SkippedRow, convert_rows
from dataset_builders.readers.source_files import SourceFile, row_parts, subset_patterns
from dataset_builders.readers.table_files import (
    ARROW_SUFFIXES,
    check_columns,
    iter_table_rows,
    list_table_parts,
    table_facts,
    value_of,
)
from dataset_builders.readers.text_files import JSON_SUFFIXES, iter_json_rows, json_file_parts, parse_json
from dataset_builders.readers.video_refs import VideoOptions, videos_of
from dataset_builders.storage.store import StorePath

_TABLES = (".parquet", *ARROW_SUFFIXES)
_SUFFIXES = (*JSON_SUFFIXES, *_TABLES)


class ConversationOptions(BoxOptions, ImageRefOptions, VideoOptions):
    """Options for the conversion of a raw row to a sample."""


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """Return globs of the files of these subsets, and of every image file: a row may name any of them."""
    return (*subset_patterns(subsets, _SUFFIXES), *MEDIA_PATTERNS)


def list_parts(source: StorePath, subsets: Sequence[str], options: ConversationOptions, *, column: str) -> list[Part]:
    """Return the parts of all files, in order of subsets, files and rows. A table must have `column`."""
    check_image_root(source, options.image_root)

    def parts_of(file: SourceFile, subset: str) -> list[Part]:
        if not file.path.name.endswith(_TABLES):
            return json_file_parts(file, subset)
        return list_table_parts([file], subset, None, lambda path, schema: check_columns(path, schema, (column,)))

    return row_parts(source, subsets, _SUFFIXES, parts_of)


def iter_part(
    part: Part, options: ConversationOptions, rows: Container[int] | None = None, *, column: str
) -> Iterator[Sample | SkippedRow]:
    """Yield samples and unusable rows of one part, in order. A few rows are in memory at a time."""
    reader = ImageReader(part, options.image_root)

    def convert(key: str, record: Mapping[str, Any]) -> Iterator[Sample]:
        yield _conversation(record, column, options).sample(key, reader.read, options)

    records = _iter_table(part, rows) if part.path.name.endswith(_TABLES) else iter_json_rows(part, rows)
    return convert_rows(part, records, convert)


def _builder(column: str) -> Builder:
    return Builder(
        options=ConversationOptions,
        patterns=patterns,
        list_parts=partial(list_parts, column=column),
        iter_part=partial(iter_part, column=column),
    )


OPENAI_MESSAGES = _builder("messages")
LLAVA = _builder("conversations")


def _conversation(record: Mapping[str, Any], column: str, options: ConversationOptions) -> Conversation:
    images, videos = images_of(record), videos_of(record, options.frame_rate)
    # In OpenAI's form it matters whether the row has a field of images; in ShareGPT's, marks alone place images.
    if column == "messages":
        return from_openai(record, images, videos, options.frame_rate)
    return from_sharegpt(record, images or [], videos or [])


def _iter_table(part: Part, rows: Container[int] | None) -> Iterator[tuple[int, dict[str, Any] | SkipSample]]:
    (facts,) = table_facts([part.path])
    names = facts.schema.names
    columns = [name for name in names if (name in ROW_KEYS or is_watched(name)) and names.count(name) == 1]
    for row, record in iter_table_rows(part, columns, rows):
        try:
            yield row, {name: _json_value(value_of(record, name), record[name].type) for name in columns}
        except SkipSample as skip:
            yield row, skip


def _json_value(value: Any, kind: pa.DataType) -> Any:
    """Return the value, with every text in it that Arrow marks as JSON parsed."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(kind, pa.JsonType):
        return parse_json(value)
    if isinstance(value, list):
        return [_json_value(item, kind.value_type) for item in value]
    if isinstance(value, dict):
        return {field.name: _json_value(value[field.name], field.type) for field in kind}
    return value
