"""Reading of a file's first rows, and of a tar's first samples, whatever their columns and members are."""

import itertools
from collections.abc import Mapping
from typing import Any

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError
from dataset_builders.readers.source_files import SourceFile
from dataset_builders.readers.table_files import (
    ARROW_SUFFIXES,
    class_names,
    iter_table_rows,
    list_table_parts,
    table_facts,
    value_of,
)
from dataset_builders.readers.tar_files import Group, iter_groups, list_group_spans
from dataset_builders.readers.text_files import (
    CSV_SUFFIXES,
    JSON_SUFFIXES,
    MAX_ROW_BYTES,
    csv_file_parts,
    csv_header,
    iter_csv_rows,
    iter_json_rows,
    json_file_parts,
)

TABLE_SUFFIXES = (".parquet", *ARROW_SUFFIXES)
ROW_SUFFIXES = (*TABLE_SUFFIXES, *CSV_SUFFIXES, *JSON_SUFFIXES)
TAR_SUFFIX = ".tar"
_ROWS = 40


def peek_rows(file: SourceFile) -> list[Mapping[str, Any]]:
    """Return the first 40 rows as name -> value, without rows that cannot be read."""
    if file.name.endswith((*CSV_SUFFIXES, *JSON_SUFFIXES)):
        is_csv = file.name.endswith(CSV_SUFFIXES)
        parts = csv_file_parts(file, "", csv_header(file.path)) if is_csv else json_file_parts(file, "")
        read = iter_csv_rows if is_csv else iter_json_rows
        rows = [row for _, row in itertools.islice(read(parts[0]), _ROWS)] if parts else []
        records = [row for row in rows if not isinstance(row, SkipSample)]
        if rows and not records:
            raise InputError(f"{file.name}: its first rows cannot be read; row 0: {rows[0].reason}: {rows[0].detail}")
        return records
    (facts,) = table_facts([file.path])
    parts = list_table_parts([file], "", None, lambda *_: None)
    names = [name for name in facts.schema.names if facts.schema.names.count(name) == 1]
    if not parts:
        return [dict.fromkeys(names)]
    return [
        {name: _value(record, name) for name in names} for _, record in iter_table_rows(parts[0], names, range(_ROWS))
    ]


def peek_classes(file: SourceFile) -> dict[str, list[str]]:
    """Return column -> the names of its classes; only tables have them."""
    return class_names(file.path) if file.name.endswith(TABLE_SUFFIXES) else {}


def peek_groups(file: SourceFile) -> list[dict[str, bytes]]:
    """Return field -> content for each of a tar's first samples; only JSON is read, other fields are empty."""
    spans = list(itertools.islice(list_group_spans(file.path), 1))
    groups = itertools.islice(iter_groups(file.path, spans[0][:2]), _ROWS) if spans else ()
    return [{field: _json(group, field) for field in group.fields} for group in groups]


def _json(group: Group, field: str) -> bytes:
    try:
        return group.read(field, MAX_ROW_BYTES, "schema_error") if field == "json" else b""
    except SkipSample:
        return b""


def _value(record: Any, name: str) -> Any:
    try:
        return value_of(record, name)
    except SkipSample:
        return None
