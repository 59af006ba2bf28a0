"""Rows of conversations from JSON, parquet or Arrow files, with values as parsed from JSON.

In parquet, a column of messages is a list of structs or JSON text. Columns of Arrow's type `arrow.json` are parsed; the
library datasets uses this type for a content that is text in one row and a list in another.
"""

from collections.abc import Container, Iterator, Sequence
from typing import Any

import pyarrow as pa

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.readers.conversation import ROW_KEYS
from dataset_builders.readers.file_patterns import SourceFile
from dataset_builders.readers.json_lines import JSON_SUFFIXES, iter_json_rows, json_file_parts, parse_json
from dataset_builders.readers.parts import Part, SkippedRow
from dataset_builders.readers.row_files import number_on, subset_files
from dataset_builders.readers.table_files import (
    ARROW_SUFFIXES,
    check_columns,
    iter_table_rows,
    list_table_parts,
    table_facts,
    value_of,
)
from dataset_builders.readers.unread import is_watched
from dataset_builders.storage.store import StorePath

_TABLES = (".parquet", *ARROW_SUFFIXES)
CONVERSATION_SUFFIXES = (*JSON_SUFFIXES, *_TABLES)


def list_conversation_parts(source: StorePath, subsets: Sequence[str], column: str) -> list[Part]:
    """Return the parts of all files, in order of subsets, files and rows. A table must have `column`."""
    chosen = subset_files(source, subsets, CONVERSATION_SUFFIXES)
    return [part for subset, files in chosen for part in number_on(_file_parts(f, subset, column) for f in files)]


def iter_conversation_rows(
    part: Part, rows: Container[int] | None
) -> Iterator[tuple[int, dict[str, Any] | SkippedRow]]:
    """Yield (row number in the subset, the row or the reason why it is skipped) of a part's rows, or only of `rows`."""
    return _iter_table(part, rows) if part.path.name.endswith(_TABLES) else iter_json_rows(part, rows)


def _file_parts(file: SourceFile, subset: str, column: str) -> list[Part]:
    if not file.path.name.endswith(_TABLES):
        return json_file_parts(file, subset)
    return list_table_parts([file], subset, None, lambda path, schema: check_columns(path, schema, (column,)))


def _iter_table(part: Part, rows: Container[int] | None) -> Iterator[tuple[int, dict[str, Any] | SkippedRow]]:
    (facts,) = table_facts([part.path])
    names = facts.schema.names
    columns = [name for name in names if (name in ROW_KEYS or is_watched(name)) and names.count(name) == 1]
    for row, record in iter_table_rows(part, columns, rows):
        try:
            yield row, {name: _json_value(value_of(record, name), record[name].type) for name in columns}
        except SkipSample as skip:
            yield row, SkippedRow(part.key(row), skip.reason, skip.detail)


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
