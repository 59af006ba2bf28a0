"""Any parquet, Arrow, CSV or JSON files -> Sample, by a mapping of their columns.

The source is a directory or a URL of .parquet, .arrow, .feather, .ipc, .csv, .tsv, .jsonl or .json files, in folders or
directly, or one such file. See `source_files.py` for the files of a subset, and `text_files.py` for the forms of a CSV
and of a JSON file. A raw row, and the options that map its columns:

    {"picture": {"bytes": b"\\x89PNG...", "path": None}, "topic": "cats", "replies": ["two", "2"], "part": "test"}

    image: picture
    question: "How many {topic} are there?"
    answer: replies
    split: part

becomes

    Sample(key="train/00000012", images=(b"\\x89PNG...",), messages=(
        user "<image>How many cats are there?", assistant "two"))

in the held-out split. With `references: replies`, both replies become references, which only scores use. An image
column holds bytes, a struct {bytes, path}, a text that names a file (`image_refs.py`), or a list of one of these. Bytes
take precedence over a path. A column of videos (`video: clip`) holds them in the forms of `video_refs.py`, and
`<video>` stands for each; `video_start` and `video_end` name columns of seconds. A text column holds texts, numbers, or
true and false. Questions with as many `<image>` as the row has images keep them in position. Texts are stripped, and
CRLF becomes LF. In a CSV file every value is text, and an empty cell of an image, a video, of references or of the
split is null. A row of a JSON file is an object with every field that the options name; a missing value must be written
as null.

Left out: values that are null or not UTF-8, NaN and infinities (schema_error), missing images (image_not_found),
answers or system texts that contain `<image>` (special_token_in_text), rows whose split column is null (schema_error),
rows of a CSV file with too few or too many cells (schema_error), JSON rows that lack a field or have an array or an
object instead of a text (schema_error), lines that are not JSON (json_parse_error), and all that Sample.check refuses.
"""

import dataclasses
import math
import re
from collections.abc import Container, Iterator, Sequence
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa
from pydantic import Field

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, Sample, SkipSample, Split, Video
from dataset_builders.errors import InputError
from dataset_builders.readers.box_places import BoxOptions, with_boxes
from dataset_builders.readers.conversation import answer_of, check_unread, is_watched, place_numbered
from dataset_builders.readers.image_refs import MEDIA_PATTERNS, ImageReader, ImageRefOptions, check_image_root
from dataset_builders.readers.parts import Builder, Part, SkippedRow, convert_rows
from dataset_builders.readers.source_files import SourceFile, nearest, number_on, subset_files, subset_patterns
from dataset_builders.readers.table_files import (
    ARROW_SUFFIXES,
    class_names,
    image_bytes,
    is_bytes,
    is_text,
    item_kind,
    iter_table_rows,
    kind_of,
    list_table_parts,
    stripped,
    table_facts,
    value_of,
)
from dataset_builders.readers.text_files import (
    CSV_SUFFIXES,
    JSON_SUFFIXES,
    csv_file_parts,
    csv_header,
    iter_csv_rows,
    iter_json_rows,
    json_file_parts,
    json_type,
)
from dataset_builders.readers.video_refs import VideoOptions, videos_of
from dataset_builders.storage.store import StorePath

TEXT_SUFFIXES = (*CSV_SUFFIXES, *JSON_SUFFIXES)
SUFFIXES = (".parquet", *ARROW_SUFFIXES, *TEXT_SUFFIXES)
Record = pa.StructScalar | dict[str, Any]
_MAX_RUNS = 64  # per part; each run of one split becomes a part of its own, which reads its row groups again
_MARK = re.compile(r"\{([^{}]*)\}")
_CHOICE = re.compile(r"([A-Z])\. \{\1\}")
_LIST_AS_TEXT = re.compile(r"""\[\s*(['"]).*\1\s*\]|\{\s*['"].*\}""", re.DOTALL)


class TableOptions(BoxOptions, ImageRefOptions, VideoOptions):
    """The roles of the columns, and how they are read."""

    later_fields = ("class_names",)

    image: str | tuple[str, ...] | None = Field(
        description="the column of the image or images, several columns in order, or null for only text"
    )
    video: str | None = Field(default=None, description="the column of the video or videos")
    video_start: str | None = Field(default=None, description="the column of the second at which the video starts")
    video_end: str | None = Field(default=None, description="the column of the second at which the video ends")
    question: str = Field(
        min_length=1,
        description="a column, or a text with {column} in it; a text that is the same for all rows begins with <image> "
        "or <video>",
    )
    answer: str = Field(min_length=1, description="the column of the answer")
    answers: Literal["first", "join"] = Field(
        default="first", description="if the answer is a list: use the first, or join all"
    )
    references: str | None = Field(
        default=None,
        description="the column of all right answers, one or a list; may be the answer's column; used only for scores",
    )
    separator: str = Field(default=", ", description="between the answers that are joined")
    system: str | None = Field(default=None, description="the column of the system message, or a text with {column}")
    null_image: Literal["skip", "absent"] = Field(
        default="skip", description="skip: a row with a null image is left out; absent: the image just is not there"
    )
    split: str | None = Field(
        default=None, description="the column of the split, with equal values in runs; null: convert chooses"
    )
    train_splits: tuple[str, ...] = Field(default=("train",), description="values of the split column to train on")
    heldout_splits: tuple[str, ...] = Field(
        default=("validation", "test"), description="values of the split column that are held out"
    )
    class_names: bool = Field(
        default=False, description="whether a class number is replaced by the name in the file's schema (ClassLabel)"
    )


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """Return globs of the tables of these subsets (none means all), and of every image file: a row may name any."""
    return (*subset_patterns(subsets, SUFFIXES), *MEDIA_PATTERNS)


def list_parts(source: StorePath, subsets: Sequence[str], options: TableOptions) -> list[Part]:
    """Return all parts of the source in order of subsets, files and rows, cut where the value of the split changes."""
    chosen = subset_files(source, subsets, SUFFIXES)
    check_image_root(source.parent if source.is_file() else source, options.image_root)
    parts: list[Part] = []
    for subset, files in chosen:
        parts += _subset_parts(files, subset, options)
    return parts if options.split is None else [run for part in parts for run in _split_part(part, options)]


def iter_part(part: Part, options: TableOptions, rows: Container[int] | None = None) -> Iterator[Sample | SkippedRow]:
    """Yield samples and unusable rows of one part, in order of their keys. A few rows are in memory at a time."""
    reader = ImageReader(part, options.image_root)
    is_table = not part.name.endswith(TEXT_SUFFIXES)
    names = class_names(part.path) if options.class_names and is_table else {}
    columns = _columns(options)
    if is_table:
        (facts,) = table_facts([part.path])
        columns += [
            name for name in facts.schema.names if name not in columns and _is_watched(name, facts.schema, options)
        ]

    def convert(key: str, record: Record) -> Iterator[Sample]:
        if is_table:
            record = {column: _named(value_of(record, column), names.get(column)) for column in columns}
        yield _sample(key, record, reader, options)

    return convert_rows(part, _iter_rows(part, columns, options, rows), convert)


BUILDER = Builder(options=TableOptions, patterns=patterns, list_parts=list_parts, iter_part=iter_part, has_splits=True)


def _subset_parts(files: Sequence[SourceFile], subset: str, options: TableOptions) -> list[Part]:
    """Return the parts of a subset's files, which may be of different kinds."""
    parts_of: dict[str, list[Part]] = {}
    tables = [file for file in files if not file.name.endswith(TEXT_SUFFIXES)]
    for part in list_table_parts(tables, subset, None, lambda path, schema: _check_schema(path, schema, options)):
        parts_of.setdefault(part.name, []).append(part)
    for file in files:
        if file.name.endswith(CSV_SUFFIXES):
            header = csv_header(file.path)
            _check_columns(file.path, header.columns, options)
            parts_of[file.name] = csv_file_parts(file, subset, header)
        elif file.name.endswith(JSON_SUFFIXES):
            parts_of[file.name] = json_file_parts(file, subset)
    return number_on(parts_of.get(file.name, []) for file in files)


def _iter_rows(
    part: Part, columns: Sequence[str], options: TableOptions, rows: Container[int] | None
) -> Iterator[tuple[int, Record | SkipSample]]:
    """Yield (row number in the subset, the row or the reason for skipping) of a part of any kind of file."""
    if not part.name.endswith(TEXT_SUFFIXES):
        yield from iter_table_rows(part, columns, rows)
        return
    nullable = {*_image_columns(options), *_video_columns(options), options.references, options.split}
    nullable -= {options.answer}
    own = range(part.first_row, part.first_row + part.num_rows)
    chosen = own if rows is None else {row for row in own if row in rows}
    # The part as it was before `_split_part` cut it: its span begins `skip` rows before its own first row.
    whole = dataclasses.replace(
        part, first_row=own.start - part.skip, file_row=part.file_row - part.skip, num_rows=part.skip + part.num_rows
    )
    if part.name.endswith(JSON_SUFFIXES):
        yield from iter_json_rows(whole, chosen)
        return
    for row, record in iter_csv_rows(whole, chosen):
        if not isinstance(record, SkipSample):
            record |= {name: None for name in nullable & record.keys() if not record[name].strip()}
            lists = [name for name in columns if _LIST_AS_TEXT.fullmatch((record.get(name) or "").strip())]
            if lists:
                detail = f"{lists[0]} is a list written as text, {record[lists[0]][:60]!r}; write rows as JSON lines"
                record = SkipSample("schema_error", detail)
        yield row, record


def _is_watched(name: str, schema: pa.Schema, options: TableOptions) -> bool:
    """Whether a column that no option names is looked at: an image only where no column is one."""
    is_image = options.image is not None and _is_image(schema.field(name).type) and not is_text(schema.field(name).type)
    return schema.names.count(name) == 1 and is_watched(name) and not is_image


def _split_part(part: Part, options: TableOptions) -> Iterator[Part]:
    """Cut the part where the split changes. A row without a split stays with the row before it and is skipped there."""
    runs: list[tuple[Split, int]] = []  # (split, first row)
    for row, record in _iter_rows(part, [options.split], options, None):
        try:
            split = _split_of(record, options) or (runs[-1][0] if runs else "train")
        except LookupError as error:
            where = f"{part.path}, row {row - part.first_row + part.file_row}"
            raise InputError(
                f"{where}: column {options.split!r} holds {error}, which is neither in options.train_splits nor in "
                "options.heldout_splits; add it to one of them"
            ) from None
        if not runs or split != runs[-1][0]:
            runs.append((split, row))
    if len(runs) > _MAX_RUNS:
        raise InputError(
            f"{part.path}: column {options.split!r} changes {len(runs) - 1} times in {part.num_rows} rows; sort the "
            "table by it, or write a file for each split"
        )
    ends = [first for _, first in runs[1:]] + [part.first_row + part.num_rows]
    for (split, first), end in zip(runs, ends):
        skip = first - part.first_row
        yield dataclasses.replace(
            part, split=split, first_row=first, file_row=part.file_row + skip, num_rows=end - first, skip=skip
        )


def _split_of(record: Record | SkipSample, options: TableOptions) -> Split | None:
    """Return our split of a row; None if it is null or unreadable. Raises LookupError for a value in neither list."""
    if isinstance(record, SkipSample):
        return None
    try:
        value = _text(_value(record, options.split), options.split)
    except SkipSample:
        return None
    if value not in (*options.train_splits, *options.heldout_splits):
        raise LookupError(repr(value[:80]))
    return "heldout" if value in options.heldout_splits else "train"


def _columns(options: TableOptions) -> list[str]:
    """Return every column that is read, each once."""
    files = (*_image_columns(options), *_video_columns(options))
    return list(dict.fromkeys([*files, *_answer_columns(options), *_value_columns(options)]))


def _answer_columns(options: TableOptions) -> tuple[str, ...]:
    """Return the columns that hold one answer or a list of answers."""
    return (options.answer,) if options.references is None else (options.answer, options.references)


def _value_columns(options: TableOptions) -> list[str]:
    """Return the columns that hold one text or number per row."""
    texts = [*_text_columns(options.question), *_text_columns(options.system or "")]
    return texts if options.split is None else [*texts, options.split]


def _image_columns(options: TableOptions) -> tuple[str, ...]:
    return (options.image,) if isinstance(options.image, str) else options.image or ()


def _video_columns(options: TableOptions) -> tuple[str, ...]:
    names = (options.video, options.video_start, options.video_end)
    return tuple(name for name in names if name is not None)


def _text_columns(text: str) -> list[str]:
    """Return the columns of a text: one column's name, or each {column} in it; a text with a slot may have none."""
    marks = _MARK.findall(text)
    return marks if marks or IMAGE_SLOT in text or VIDEO_SLOT in text or not text else [text]


def _check_columns(path: StorePath, names: Sequence[str], options: TableOptions) -> None:
    for column in _columns(options):
        if column not in names:
            known = ", ".join(name if name.isprintable() else ascii(name) for name in names)
            way_out = f"the columns there are: {known}{nearest(column, names)}"
            raise InputError(f"{path} has no column {column!r}; {way_out}")
        if names.count(column) > 1:
            raise InputError(f"{path} has the column {column!r} {names.count(column)} times; rename the others")


def _check_schema(path: StorePath, schema: pa.Schema, options: TableOptions) -> None:
    _check_columns(path, schema.names, options)
    for columns, is_readable, kinds in (
        (_image_columns(options), _is_image, "bytes, a struct {bytes, path}, text, or a list of one of them"),
        (
            _answer_columns(options),
            lambda kind: _is_value(item_kind(kind) or kind),
            "text, numbers, true and false, or a list of them",
        ),
        (_value_columns(options), _is_value, "text, numbers, or true and false"),
        (_video_columns(options)[1:], _is_value, "numbers of seconds"),
    ):
        for column in columns:
            if not is_readable(schema.field(column).type):
                raise InputError(f"{path}: column {column!r} is {schema.field(column).type}; {kinds} can be read")


def _is_image(kind: pa.DataType) -> bool:
    kind = item_kind(kind) or kind_of(kind)
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        has_bytes = "bytes" in fields and is_bytes(fields["bytes"])
        return has_bytes or ("path" in fields and is_text(fields["path"]))
    return is_bytes(kind) or is_text(kind) or pa.types.is_null(kind)


def _is_value(kind: pa.DataType) -> bool:
    kind = kind_of(kind)
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean, pa.types.is_null)
    return is_text(kind) or any(test(kind) for test in tests)


def _sample(key: str, record: Record, reader: ImageReader, options: TableOptions) -> Sample:
    if options.split is not None:
        _text(_value(record, options.split), options.split)  # a row without a split is left out
    check_unread(record, _columns(options), bool(options.image or options.video))
    images = _images(record, reader, options)
    videos = _videos(record, reader, options)
    (question,), images = place_numbered([_filled(options.question, record)], images)
    if not images and options.null_image == "absent" and "<" in options.question:
        question = question.replace(IMAGE_SLOT, "")
    if not videos and options.null_image == "absent" and "<" in options.question:
        question = question.replace(VIDEO_SLOT, "")
    if VIDEO_SLOT not in question:
        question = VIDEO_SLOT * len(videos) + question
    if IMAGE_SLOT not in question:
        question = IMAGE_SLOT * len(images) + question
    answer = answer_of(_answer(record, options), references=_references(record, options))
    messages = [Message(role="user", text=question.strip()), answer]
    if options.system is not None:
        messages.insert(0, Message(role="system", text=_filled(options.system, record)))
    for message in messages:
        for slot in (IMAGE_SLOT, VIDEO_SLOT):
            if message.role != "user" and slot in message.text:
                raise SkipSample("special_token_in_text", f"the {message.role} text holds {slot}")
    sample = Sample(key=key, messages=with_boxes(messages, images, options), images=tuple(images), videos=videos)
    sample.check()
    return sample


def _images(record: Record, reader: ImageReader, options: TableOptions) -> tuple[bytes, ...]:
    """Return the row's images, in order of columns and of a list's items."""
    images: list[bytes] = []
    for column in _image_columns(options):
        value = _value(record, column)
        if value is None or (isinstance(value, dict) and not any(value.get(name) for name in ("bytes", "path"))):
            if options.null_image == "absent":
                continue
            raise SkipSample("schema_error", f"{column} is null")
        for image in value if isinstance(value, list) else [value]:
            images.append(image_bytes(image, len(images), reader))
    return tuple(images)


def _videos(record: Record, reader: ImageReader, options: TableOptions) -> tuple[Video, ...]:
    """Return the row's videos, each with the row's own start and end where columns have them."""
    if options.video is None:
        return ()
    value = _value(record, options.video)
    refs = videos_of({"video": value}, options.frame_rate)
    if refs is None:
        if options.null_image == "absent":
            return ()
        raise SkipSample("schema_error", f"{options.video} is null")
    times = {}
    for field, column in (("start", options.video_start), ("end", options.video_end)):
        if column is not None and _value(record, column) is not None:
            text = _text(_value(record, column), column)
            try:
                times[field] = float(text)
            except ValueError:
                times[field] = math.nan
            if not 0 <= times[field] < math.inf:
                raise SkipSample("schema_error", f"{column} is {text[:40]!r}, no number of seconds from 0 on")
    if times and not all(ref.is_file for ref in refs):
        raise SkipSample("schema_error", f"{options.video} is a list of frames, which start and end do not cut")
    return tuple(dataclasses.replace(ref, **times).video(reader.read) for ref in refs)


def _filled(text: str, record: Record) -> str:
    """Return the text of the column, or the text with each {column} replaced by that column's value.

    A line like `D. {D}` after the first one is left out where its column is empty: questions differ in their choices.
    """
    columns = _text_columns(text)
    if columns == [text]:
        return _text(_value(record, text), text)
    first, *others = text.split("\n")
    others = [line for line in others if not _CHOICE.fullmatch(line) or _value(record, line[4:-1]) not in (None, "")]
    return _MARK.sub(lambda mark: _text(_value(record, mark[1]), mark[1]), "\n".join([first, *others])).strip()


def _answer(record: Record, options: TableOptions) -> str:
    value = _value(record, options.answer)
    if not isinstance(value, list):
        return _text(value, options.answer)
    if not value:
        raise SkipSample("empty_target", f"{options.answer} is an empty list")
    chosen = value[:1] if options.answers == "first" else value
    return options.separator.join(_text(item, options.answer) for item in chosen)


def _references(record: Record, options: TableOptions) -> tuple[str, ...]:
    """Return all right answers; none if the column is null."""
    value = None if options.references is None else _value(record, options.references)
    items = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_text(item, options.references or "") for item in items)


def _value(record: Record, column: str) -> object:
    if isinstance(record, pa.StructScalar):
        return value_of(record, column)
    if column not in record:
        raise SkipSample("schema_error", f"the row has no field {column!r}{nearest(column, record)}")
    return record[column]


def _named(value: object, names: Sequence[str] | None) -> object:
    """Return the name of a class number of a column of classes; any other value is returned unchanged."""
    if names is None or not isinstance(value, int):
        return value
    if not 0 <= value < len(names):
        raise SkipSample("schema_error", f"{value} is no number of the {len(names)} classes")
    return names[value]


def _text(value: object, column: str) -> str:
    if isinstance(value, list | dict):
        raise SkipSample("schema_error", f"{column} holds {json_type(value)}")
    if isinstance(value, str):
        return stripped(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or (isinstance(value, float | Decimal) and not math.isfinite(value)):
        raise SkipSample("schema_error", f"{column} is {'null' if value is None else value}")
    return str(value)
