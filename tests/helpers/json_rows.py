"""Sources of JSON rows in the formats that other tools write, and the samples that a builder makes of a source."""

import base64
import json
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from dataset_builders.contracts.sample import Sample
from dataset_builders.readers.parts import SkippedRow
from dataset_builders.sources.registry import get_builder
from dataset_builders.storage.store import StorePath


def data_uri(image: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def json_lines(rows: Sequence[Any]) -> bytes:
    """Return one line per row. Bytes, and texts that are lines already, are unchanged."""
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


def write_file(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def read_source(
    builder: str, source: StorePath, subsets: Sequence[str] = (), rows: Container[int] | None = None, **options: Any
) -> list[Sample | SkippedRow]:
    """Return all results of a builder for a source, in order."""
    found = get_builder(builder)
    checked = found.options.model_validate(options)
    parts = found.list_parts(source, subsets, checked)
    return [item for part in parts for item in found.iter_part(part, checked, rows)]


def turns(item: Sample | SkippedRow) -> list[tuple[str, str]]:
    assert isinstance(item, Sample), item
    return [(message.role, message.text) for message in item.messages]


def reasons(items: Sequence[Sample | SkippedRow]) -> list[str | None]:
    """Return the skip reason of each result; None for a sample."""
    return [item.reason if isinstance(item, SkippedRow) else None for item in items]
