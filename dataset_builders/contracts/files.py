"""Whole files or none: a file is written under another name and then published, by a rename or by an upload."""

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from dataset_builders.contracts.local_cache import cache_dir
from dataset_builders.contracts.store import StorePath, is_local, publish


@contextlib.contextmanager
def atomic_path(path: StorePath) -> Iterator[Path]:
    """A temporary local path whose file is published as `path` when the block ends without an error."""
    tmp = temporary_path(path)
    try:
        yield tmp
        publish(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def temporary_path(path: StorePath) -> Path:
    """Where a file is written that will be published as `path`: beside it, or in the cache directory for a store."""
    name = f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    if is_local(path):
        return path.with_name(name)
    uploads = cache_dir() / "uploads"
    uploads.mkdir(parents=True, exist_ok=True)
    return uploads / name


def write_text(path: StorePath, text: str) -> None:
    """Write `text` as UTF-8 so that a reader sees the old file or the new one, never a part."""
    with atomic_path(path) as tmp, tmp.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: StorePath, value: object) -> None:
    """Write `value` as indented JSON with sorted keys, atomically; the same value gives the same bytes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def sha256_file(path: StorePath) -> str:
    """64 hex digits of a file's SHA-256, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
