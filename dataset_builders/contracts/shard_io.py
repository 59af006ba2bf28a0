"""Shards: plain WebDataset tars whose bytes depend on their samples alone, and reads of one record by offset.

A shard is written under a temporary name, renamed when whole, and then committed by `<name>.json` beside it,
a ShardEntry. A rerun in the same scratch directory skips every shard that has its entry.
"""

import io
import json
import os
import tarfile
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import webdataset

from dataset_builders.contracts.files import sha256_file, write_json
from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import Split


@dataclass(frozen=True, slots=True)
class RecordRange:
    """Where one sample's members lie in a shard: bytes [offset, offset + size)."""

    key: str
    offset: int
    size: int


class ShardWriter:
    """Writes one shard. Members are `key.field`; no time, owner or host enters the bytes.

    Use as a context manager; call `commit` inside it after the last record.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.path = directory / name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._tmp = self.path.with_name(self.path.name + ".tmp")
        self._file = self._tmp.open("wb")
        self._tar = webdataset.TarWriter(self._file, encoder=False, mtime=0, user="athanor", group="athanor")
        self.ranges: list[RecordRange] = []

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._tmp.unlink(missing_ok=True)

    def write(self, key: str, fields: Mapping[str, bytes]) -> RecordRange:
        """Append one sample; returns where it went."""
        start = self._tar.tarstream.offset
        self._tar.write({"__key__": key, **fields})
        record = RecordRange(key, start, self._tar.tarstream.offset - start)
        self.ranges.append(record)
        return record

    def commit(self, split: Split, skips: Mapping[str, int] | None = None) -> ShardEntry:
        """Close, publish and record the shard."""
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._tmp, self.path)
        entry = ShardEntry(
            name=self.name,
            split=split,
            num_samples=len(self.ranges),
            size_bytes=self.path.stat().st_size,
            sha256=sha256_file(self.path),
            skips=dict(skips or {}),
        )
        write_json(_entry_path(self.directory, self.name), entry.model_dump(mode="json"))
        return entry


def finished_shard(directory: Path, name: str) -> ShardEntry | None:
    """The entry of a shard that an earlier, interrupted try committed in this directory, or None."""
    path = _entry_path(directory, name)
    if not path.is_file():
        return None
    entry = ShardEntry.model_validate(json.loads(path.read_text()))
    shard = directory / name
    return entry if shard.is_file() and shard.stat().st_size == entry.size_bytes else None


def remove_entries(directory: Path, names: list[str]) -> None:
    """Delete the commit records beside the shards, once the manifest holds them."""
    for name in names:
        _entry_path(directory, name).unlink(missing_ok=True)


def read_record(path: Path, offset: int, size: int, without: Container[str] = ()) -> dict[str, bytes]:
    """The fields of one sample, by one positioned read of its byte range in the shard.

    Args:
        without: fields that are passed over on disk; then each other field is a read of its own.
    """
    with path.open("rb") as file:
        if without:
            return dict(_chosen(file, offset, size, without))
        data = os.pread(file.fileno(), size, offset)
    if len(data) != size:
        raise OSError(f"{path}: wanted {size} bytes at {offset}, got {len(data)}; the shard is cut short")
    return dict(field for _, field in _members(io.BytesIO(data)))


def iter_records(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """(key, fields) of every sample in a shard, in order."""
    key, fields = None, {}
    with path.open("rb") as file:
        for member_key, (field, data) in _members(file):
            if key is not None and member_key != key:
                yield key, fields
                fields = {}
            key = member_key
            fields[field] = data
    if key is not None:
        yield key, fields


def _members(file: io.IOBase) -> Iterator[tuple[str, tuple[str, bytes]]]:
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            folder, _, base = member.name.rpartition("/")
            stem, _, field = base.partition(".")
            yield (f"{folder}/{stem}" if folder else stem), (field, tar.extractfile(member).read())


def _chosen(file: BinaryIO, offset: int, size: int, without: Container[str]) -> Iterator[tuple[str, bytes]]:
    file.seek(offset)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None and member.offset < offset + size:
            field = member.name.rpartition("/")[2].partition(".")[2]
            if field not in without:
                yield field, tar.extractfile(member).read()


def _entry_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.json"
