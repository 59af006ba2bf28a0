"""HuggingFaceM4/the_cauldron, or any directory of parquet files in its schema -> Sample.

The source is a directory of `<subset>/*.parquet`; a subset may be 563 files or one. A raw row:

    {"images": [{"bytes": b"\\x89PNG...", "path": None}],
     "texts": [{"user": "Which digit is this?", "assistant": "7", "source": "digits"},
               {"user": "Is it even or odd?",   "assistant": "odd", "source": "digits"}]}

becomes, with turns: chat, one sample of two turns, the image slots before the first question:

    Sample(key="digits/00000012", images=(b"\\x89PNG...",), messages=(
        user "<image>Which digit is this?", assistant "7", user "Is it even or odd?", assistant "odd"))

and with turns: split one sample a pair, keys digits/00000012-0 and digits/00000012-1, each with the images.
Questions that hold as many `<image>` as the row has images keep them where they are. Texts are stripped, and
CRLF becomes LF.

Left out: rows whose fields are null or not UTF-8 (schema_error), rows without a pair (no_text), answers that hold
`<image>` (special_token_in_text), and whatever Sample.check refuses.
"""

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample
from dataset_builders.contracts.store import StorePath
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.parts import Builder, Part, SkippedRow, natural_order

_PART_ROWS = 512  # a part ends at the first row group border after as many rows
_READ_ROWS = 16  # rows in memory at a time: a row may hold dozens of images
_BUFFER_BYTES = 1 << 20
_TEXT_FIELDS = ("user", "assistant")


class CauldronOptions(StrictModel):
    """How a raw row becomes samples."""

    turns: Literal["chat", "split"] = Field(
        description="chat: all question-answer pairs of a row in one conversation; split: one sample a pair"
    )


def patterns(subsets: Sequence[str]) -> tuple[str, ...]:
    """The parquet files of these subsets, of all without a name."""
    return tuple(f"{subset}/*.parquet" for subset in subsets or ("*",))


def list_parts(source: StorePath, subsets: Sequence[str], options: CauldronOptions) -> list[Part]:
    """All parts of the source: subsets by name, files in numeric order, row groups in file order.

    Raises:
        InputError: no such directory or subset, no parquet file, a file of another schema or that is no parquet.
    """
    directories = _subset_dirs(source, subsets)
    parts: list[Part] = []
    for directory in directories:
        first_row = 0
        files = sorted(directory.glob("*.parquet"), key=lambda path: natural_order(path.name))
        for path in files:
            file_parts = _file_parts(path, directory.name, first_row)
            first_row += sum(part.num_rows for part in file_parts)
            parts += file_parts
    return parts


def iter_part(
    part: Part, options: CauldronOptions, rows: Container[int] | None = None
) -> Iterator[Sample | SkippedRow]:
    """Samples and unusable rows of one part, in order of their keys; memory stays at a few rows.

    Raises:
        InputError: the file cannot be read to its end.
    """
    for row, record in _iter_rows(part, rows):
        key = part.key(row)
        try:
            texts, images = _fields(record)
        except SkipSample as skip:
            yield SkippedRow(key, skip.reason, skip.detail)
            continue
        if options.turns == "chat":
            yield _sample(key, texts, images)
        else:
            yield from (_sample(f"{key}-{i}", [pair], images) for i, pair in enumerate(texts))


BUILDER = Builder(options=CauldronOptions, patterns=patterns, list_parts=list_parts, iter_part=iter_part)


def _subset_dirs(source: Path, subsets: Sequence[str]) -> list[Path]:
    if not source.is_dir():
        raise InputError(f"raw data directory {source} does not exist; it should hold <subset>/*.parquet")
    found = {d.name: d for d in source.iterdir() if d.is_dir() and any(d.glob("*.parquet"))}
    if not found:
        inside = any(source.glob("*.parquet"))
        hint = f"; it is one subset: give {source.parent} and subsets=[{source.name}]" if inside else ""
        raise InputError(f"raw data directory {source} holds no <subset>/*.parquet{hint}")
    for name in subsets:
        if name not in found:
            raise InputError(f"no subset {name!r} in {source}; there are: {', '.join(sorted(found))}")
    names = sorted(set(subsets) or found, key=natural_order)
    for name in names:
        if not name.isascii() or not name.replace("_", "").replace("-", "").isalnum():
            raise InputError(f"subset directory {found[name]}: rename it, only letters, digits, _ and - make keys")
    return [found[name] for name in names]


def _file_parts(path: Path, subset: str, first_row: int) -> list[Part]:
    """A file's row groups gathered into parts of about _PART_ROWS rows."""
    metadata = _checked_metadata(path)
    name = f"{subset}/{path.name}"
    parts, start, file_row, num_rows = [], 0, 0, 0
    for group in range(metadata.num_row_groups):
        num_rows += metadata.row_group(group).num_rows
        if num_rows >= _PART_ROWS or group == metadata.num_row_groups - 1:
            parts.append(
                Part(
                    path=path,
                    name=name,
                    subset=subset,
                    span=(start, group + 1),
                    first_row=first_row + file_row,
                    file_row=file_row,
                    num_rows=num_rows,
                )
            )
            start, file_row, num_rows = group + 1, file_row + num_rows, 0
    return parts


def _checked_metadata(path: Path) -> pq.FileMetaData:
    try:
        with pq.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, PermissionError):
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        raise InputError(f"{path} is not a readable parquet file ({_one_line(error)}); download it again") from error
    for column in ("images", "texts"):
        if column not in schema.names:
            known = ", ".join(schema.names)
            raise InputError(f"{path} lacks the column {column!r}; it has: {known}. See the schema of the_cauldron")
    _check_struct(path, "images", schema.field("images").type, {"bytes": _is_bytes})
    _check_struct(path, "texts", schema.field("texts").type, dict.fromkeys(_TEXT_FIELDS, _is_text))
    return metadata


def _check_struct(path: Path, column: str, kind: pa.DataType, fields: dict) -> None:
    """The column must be a list of structs with these fields; a list of nulls (every row empty) will do."""
    wanted = f"list<struct<{', '.join(fields)}>>"
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not (pa.types.is_struct(kind.value_type) or pa.types.is_null(kind.value_type)):
        raise InputError(f"{path}: column {column!r} is {kind}, not {wanted}; see the schema of the_cauldron")
    if pa.types.is_null(kind.value_type):
        return
    for name, is_right in fields.items():
        index = kind.value_type.get_field_index(name)
        if index < 0 or not is_right(kind.value_type.field(index).type):
            found = "missing" if index < 0 else str(kind.value_type.field(index).type)
            raise InputError(f"{path}: field {name!r} of column {column!r} is {found}; {wanted} was expected")


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _iter_rows(part: Part, rows: Container[int] | None) -> Iterator[tuple[int, pa.StructScalar]]:
    """(row number in the subset, the row as a struct of arrow values), without the rows nobody asked for."""
    row = part.first_row
    try:
        with pq.ParquetFile(part.path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            for group in range(*part.span):
                end = row + file.metadata.row_group(group).num_rows
                if rows is not None and not any(r in rows for r in range(row, end)):
                    row = end
                    continue
                batches = file.iter_batches(_READ_ROWS, row_groups=[group], columns=["images", "texts"])
                for batch in batches:
                    for record in batch.to_struct_array():
                        if rows is None or row in rows:
                            yield row, record
                        row += 1
    except (pa.ArrowException, OSError) as error:
        message = f"{part.path} breaks off at row {row - part.first_row + part.file_row} ({_one_line(error)})"
        raise InputError(f"{message}; download it again") from error


def _fields(record: pa.StructScalar) -> tuple[list[tuple[str, str]], tuple[bytes, ...]]:
    """The row's (question, answer) pairs, stripped, and its images."""
    try:
        texts, images = record["texts"].as_py() or [], record["images"].as_py() or []
    except UnicodeDecodeError as error:
        raise SkipSample("schema_error", f"text that is not UTF-8: {error.reason} at byte {error.start}") from None
    for i, image in enumerate(images):
        if not image or not image["bytes"]:
            raise SkipSample("schema_error", f"image {i} has no bytes")
    for i, pair in enumerate(texts):
        for name in _TEXT_FIELDS:
            if not pair or pair[name] is None:
                raise SkipSample("schema_error", f"texts[{i}] has no {name!r}")
    if not texts:
        raise SkipSample("no_text", "texts is empty")
    pairs = [tuple(pair[name].replace("\r\n", "\n").strip() for name in _TEXT_FIELDS) for pair in texts]
    return pairs, tuple(image["bytes"] for image in images)


def _sample(key: str, pairs: Sequence[tuple[str, str]], images: tuple[bytes, ...]) -> Sample | SkippedRow:
    """One conversation of these pairs, checked."""
    own_slots = sum(question.count(IMAGE_SLOT) for question, _ in pairs)
    messages = [Message(role=r, text=t) for pair in pairs for r, t in zip(("user", "assistant"), pair)]
    if own_slots == 0:
        messages[0] = Message(role="user", text=IMAGE_SLOT * len(images) + messages[0].text)
    sample = Sample(key=key, messages=tuple(messages), images=images)
    try:
        if any(IMAGE_SLOT in answer for _, answer in pairs):
            raise SkipSample("special_token_in_text", f"an answer holds {IMAGE_SLOT}")
        sample.check()
    except SkipSample as skip:
        return SkippedRow(key, skip.reason, skip.detail)
    return sample


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
