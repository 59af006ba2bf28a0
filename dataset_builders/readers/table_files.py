"""Reading of parquet and Arrow files: parts, cut at row groups or record batches, and rows, a few at a time.

    .parquet                  a part is whole row groups; in an object store, ranges of the file are read
    .arrow .feather .ipc      Arrow's IPC file or stream; a part is whole record batches. The file is mapped into
                              memory; from a store, through a copy in the cache, because a stream has no index

A span of a part counts row groups or record batches.
"""

import contextlib
import json
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataset_builders.contracts.sample import SkipSample, Split
from dataset_builders.errors import InputError, one_line
from dataset_builders.readers.image_refs import ImageReader
from dataset_builders.readers.parts import Part
from dataset_builders.readers.source_files import SourceFile, number_on, span_parts
from dataset_builders.storage.store import StorePath, is_local, local_copy

ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
_PART_ROWS = 512  # a part ends at the first block border after this many rows
_READ_ROWS = 16  # rows in memory at a time: a row may hold dozens of images
_BUFFER_BYTES = 1 << 20
_STORE_BUFFER_BYTES = 8 << 20  # per request: larger than on a disk, so that there are fewer requests
_OPENERS = 8  # file footers read at a time: in a store, most of the time is waiting
_IPC_FILE = b"ARROW1"
_FEATHER_V1 = b"FEA1"

CheckSchema = Callable[[StorePath, pa.Schema], None]


@dataclass(frozen=True, slots=True)
class TableFacts:
    """The facts about a file that are known before its rows are read."""

    schema: pa.Schema
    blocks: tuple[int, ...]  # number of rows of each row group or record batch, in order


def list_table_parts(files: Sequence[SourceFile], subset: str, split: Split | None, check: CheckSchema) -> list[Part]:
    """Return the parts of one subset's files, in order. `check` raises InputError for a schema that it refuses."""
    facts_of = table_facts([file.path for file in files])
    for file, facts in zip(files, facts_of):
        check(file.path, facts.schema)
    return number_on(span_parts(file, subset, _cuts(facts.blocks), split) for file, facts in zip(files, facts_of))


def check_columns(path: StorePath, schema: pa.Schema, columns: Sequence[str], like: str = "") -> None:
    """Raise InputError for a file that lacks one of these columns; `like` is the dataset whose schema is expected."""
    for column in columns:
        if schema.get_field_index(column) < 0:
            example = f". See the schema of {like}" if like else ""
            raise InputError(f"{path} lacks the column {column!r}; it has: {', '.join(schema.names)}{example}")


def table_facts(paths: Sequence[StorePath]) -> list[TableFacts]:
    """Return the schema and the blocks of each file; InputError for the first that cannot be read as a table."""
    with ThreadPoolExecutor(_OPENERS) as pool:
        return list(pool.map(_facts, paths))


def class_names(path: StorePath) -> dict[str, list[str]]:
    """Return column -> the names of its classes, which the library datasets writes into a file's schema."""
    (facts,) = table_facts([path])
    try:
        features = json.loads((facts.schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: each["names"] for name, each in features.items() if each.get("_type") == "ClassLabel"}
    except (AttributeError, KeyError, TypeError, ValueError):  # no such metadata
        return {}


def iter_table_rows(
    part: Part, columns: Sequence[str], rows: Container[int] | None
) -> Iterator[tuple[int, pa.StructScalar]]:
    """Yield (row number in the subset, the row as a struct of arrow values) of the part's rows, or only of `rows`."""
    own = range(part.first_row, part.first_row + part.num_rows)  # a part may hold only some rows of its blocks
    row = part.first_row
    try:
        for file_row, num_rows, batches in _blocks(part, columns):
            row = part.first_row + file_row - part.file_row
            chosen = [r for r in range(row, row + num_rows) if r in own and (rows is None or r in rows)]
            if not chosen:
                continue
            for record in (record for batch in batches() for record in batch.to_struct_array()):
                if chosen[0] <= row <= chosen[-1] and (rows is None or row in rows):
                    yield row, record
                row += 1
                if row > chosen[-1]:
                    break
    except (pa.ArrowException, OSError) as error:
        _unreadable(part.path, error, f"breaks off at row {row - part.first_row + part.file_row}")


def value_of(record: pa.StructScalar, column: str) -> object:
    """Return a field of a row as a Python value; SkipSample if it is not UTF-8, or Python has no such value."""
    try:
        return _shortest(record[column].as_py(), record[column].type)
    except UnicodeDecodeError as error:
        raise SkipSample("schema_error", f"{column}: not UTF-8, {error.reason} at byte {error.start}") from None
    except MemoryError:
        raise
    except Exception as error:  # arrow, time zones and numbers raise many kinds of errors
        raise SkipSample("schema_error", f"{column}: {one_line(error) or type(error).__name__}") from None


def _shortest(value: object, kind: pa.DataType) -> object:
    """Return each float32 or float16 with the fewest digits that give the same number: 0.1, not 0.10000000149011612."""
    kind = item_kind(kind) or kind_of(kind)
    if not (pa.types.is_float32(kind) or pa.types.is_float16(kind)) or value is None:
        return value
    if isinstance(value, list):
        return [_shortest(item, kind) for item in value]
    return float(str(np.dtype(kind.to_pandas_dtype()).type(value)))


def image_bytes(image: object, number: int, reader: ImageReader) -> bytes:
    """Return the bytes of one image of a row; SkipSample if there are neither bytes nor a file.

    Args:
        image: bytes, a text that names a file, or a struct {bytes, path} whose bytes are taken before its path.
        number: number of the image in its row, for the message.
    """
    data, path = (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (image, image)
    if isinstance(data, bytes) and data:
        return data
    if isinstance(path, str) and path:
        return reader.read(path)
    if data == b"":
        raise SkipSample("empty", f"image {number} has zero bytes")
    raise SkipSample("schema_error", f"image {number} is {repr(image)[:40]}, neither bytes nor a name; write its path")


def kind_of(kind: pa.DataType) -> pa.DataType:
    """Return the type of the values themselves, without extension types and dictionary encoding."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind_of(kind.storage_type)
    return kind_of(kind.value_type) if pa.types.is_dictionary(kind) else kind


def item_kind(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of a list's items; None if the type is not a list."""
    kind = kind_of(kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return kind_of(kind.value_type)
    return kind_of(kind.value_type) if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind) else None


def is_bytes(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return any(test(kind_of(kind)) for test in kinds)


def is_text(kind: pa.DataType) -> bool:
    return any(test(kind_of(kind)) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def is_text_list(kind: pa.DataType) -> bool:
    """Whether values of this type are lists of text. A column of nulls, or of lists of nulls, passes too."""
    item = item_kind(kind)
    return pa.types.is_null(kind_of(kind)) or (item is not None and (is_text(item) or pa.types.is_null(item)))


def stripped(text: str) -> str:
    """Return a text without white space around it, with CRLF as LF."""
    return text.replace("\r\n", "\n").strip()


def _cuts(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first block, block after the last, rows): runs of blocks with _PART_ROWS rows or more, never 0."""
    start, num_rows = 0, 0
    for i, rows in enumerate(blocks):
        num_rows += rows
        if num_rows >= _PART_ROWS or (i == len(blocks) - 1 and num_rows):
            yield start, i + 1, num_rows
            start, num_rows = i + 1, 0


def _facts(path: StorePath) -> TableFacts:
    try:
        if _is_arrow(path):
            with _arrow_batches(path) as (schema, batches):
                return TableFacts(schema, tuple(batch.num_rows for batch in batches))
        with _parquet(path) as file:
            metadata = file.metadata
            blocks = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
            return TableFacts(file.schema_arrow, blocks)
    except (pa.ArrowException, OSError) as error:
        _unreadable(path, error, f"is not a readable {'Arrow' if _is_arrow(path) else 'parquet'} file")


def _blocks(part: Part, columns: Sequence[str]) -> Iterator[tuple[int, int, Callable[[], Iterator[pa.RecordBatch]]]]:
    """Yield (first row in the file, rows, a function that reads small batches) for each block of the span."""
    names, file_row = list(columns), 0
    if _is_arrow(part.path):
        with _arrow_batches(part.path) as (_, batches):
            for number, batch in enumerate(batches):
                if number >= part.span[1]:
                    return
                if number >= part.span[0]:
                    chosen = batch.select(names)
                    starts = range(0, len(batch), _READ_ROWS)
                    yield (
                        file_row,
                        len(batch),
                        lambda b=chosen, s=starts: (b[start : start + _READ_ROWS] for start in s),
                    )
                file_row += len(batch)
        return
    with _parquet(part.path) as file:
        for group in range(part.span[1]):
            num_rows = file.metadata.row_group(group).num_rows
            if group >= part.span[0]:
                yield file_row, num_rows, lambda g=group: file.iter_batches(_READ_ROWS, row_groups=[g], columns=names)
            file_row += num_rows


@contextlib.contextmanager
def _parquet(path: StorePath) -> Iterator[pq.ParquetFile]:
    """Open a parquet file. A file in a store is read by ranges."""
    if is_local(path):
        with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            yield file
        return
    # No read-ahead: columns are read alternately, and each jump would discard the data fetched ahead.
    with (
        path.open("rb", cache_type="none") as stream,
        pq.ParquetFile(stream, buffer_size=_STORE_BUFFER_BYTES, pre_buffer=False) as file,
    ):
        yield file


@contextlib.contextmanager
def _arrow_batches(path: StorePath) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Open an IPC file or stream, mapped into memory and not copied; give its schema and record batches."""
    with pa.memory_map(str(local_copy(path))) as source:
        magic = source.read(len(_IPC_FILE))
        source.seek(0)
        if magic[:4] == _FEATHER_V1:
            raise pa.ArrowInvalid("Feather version 1, which is not read; write it again with pyarrow")
        if magic == _IPC_FILE:
            with pa.ipc.open_file(source) as file:
                yield file.schema, (file.get_batch(i) for i in range(file.num_record_batches))
        else:
            with pa.ipc.open_stream(source) as stream:
                yield stream.schema, iter(stream)


def _is_arrow(path: StorePath) -> bool:
    return path.name.lower().endswith(ARROW_SUFFIXES)


def _unreadable(path: StorePath, error: Exception, what: str) -> NoReturn:
    """Raise InputError for an error that the user can mend. A store's broken connection is re-raised, to be retried."""
    if isinstance(error, PermissionError):
        raise InputError(f"{path} cannot be read: {error.strerror or one_line(error)}") from error
    if isinstance(error, pa.ArrowException) or is_local(path):
        raise InputError(f"{path} {what} ({one_line(error)}); download it again") from error
    raise error
