"""Shards: plain WebDataset tars whose bytes depend only on their samples. One record can be read by its offset.

A shard is written under a temporary name, renamed when it is complete, and then committed by a ShardEntry in the file
`<name>.json` in the same directory. A rerun in the same work directory skips every shard that has its entry.
"""

import hashlib
import os
import tarfile
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from dataset_builders.contracts.manifest import ShardEntry
from dataset_builders.contracts.sample import Split
from dataset_builders.errors import MANIFEST, DamagedFile, damaged
from dataset_builders.storage.files import read_sealed, temporary_path, write_sealed
from dataset_builders.storage.store import StorePath, local_copy, make_dir, publish, read_range


@dataclass(frozen=True, slots=True)
class RecordRange:
    """The byte range of one sample's members in a shard: [offset, offset + size), whose xxh3_64 is `checksum`."""

    key: str
    offset: int
    size: int
    checksum: int


class ShardWriter:
    """Writer of one shard. Members are named `key.field`. The bytes contain no time, owner or host.

    Use as a context manager; call `commit` inside it after the last record.
    """

    def __init__(self, directory: StorePath, name: str) -> None:
        self.directory, self.name = directory, name
        self.path = directory / name
        make_dir(self.path.parent)
        self._tmp = temporary_path(self.path)
        self._file = self._tmp.open("wb", buffering=1 << 20)
        self._sha256, self._offset = hashlib.sha256(), 0
        self.ranges: list[RecordRange] = []

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._tmp.unlink(missing_ok=True)

    def write(self, key: str, fields: Mapping[str, bytes]) -> RecordRange:
        """Append one sample, and return its byte range."""
        start, checksum = self._offset, xxhash.xxh3_64()
        for field in sorted(fields):
            for block in _member(f"{key}.{field}", fields[field]):
                checksum.update(block)
                self._append(block)
        record = RecordRange(key, start, self._offset - start, checksum.intdigest())
        self.ranges.append(record)
        return record

    def commit(self, split: Split, skips: Mapping[str, int] | None = None) -> ShardEntry:
        """Close, publish and record the shard."""
        end = self._offset + 2 * tarfile.BLOCKSIZE  # two empty blocks, then padding up to a whole tar record
        self._append(bytes(-(-end // tarfile.RECORDSIZE) * tarfile.RECORDSIZE - self._offset))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        publish(self._tmp, self.path)
        entry = ShardEntry(
            name=self.name,
            split=split,
            num_samples=len(self.ranges),
            size_bytes=self._offset,
            sha256=self._sha256.hexdigest(),
            skips=dict(skips or {}),
        )
        write_sealed(_entry_path(self.directory, self.name), entry.model_dump_json())
        return entry

    def _append(self, block: bytes) -> None:
        self._sha256.update(block)
        self._file.write(block)
        self._offset += len(block)


def _member(name: str, data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return header, content and padding of one member, byte for byte as webdataset's TarWriter writes them."""
    return _header(name, len(data)), data, bytes(-len(data) % tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    """Return the ustar header of a regular file (POSIX.1-1988, pax(1)): name, octal size at 124, checksum at 148."""
    # Another name needs two header fields or a member of its own: rare, so tarfile does it.
    if len(name) > 100 or not name.isascii():
        return _tar_info(name, size).tobuf(tarfile.USTAR_FORMAT)
    header = bytearray(_HEADER)
    header[: len(name)] = name.encode()
    header[124:135] = b"%011o" % size
    header[148:156] = b"%06o\0 " % sum(header)  # the checksum field counts as blanks in its own sum, as in _HEADER
    return bytes(header)


def _tar_info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o444, 0
    info.uname = info.gname = "athanor"
    return info


_HEADER = bytearray(_tar_info("", 0).tobuf(tarfile.USTAR_FORMAT))
_HEADER[148:156] = b" " * 8


def finished_shard(directory: StorePath, name: str) -> ShardEntry | None:
    """Return the entry of a shard that an interrupted run committed in this directory; None if there is none whole."""
    text = read_sealed(_entry_path(directory, name))
    if text is None:
        return None
    entry = ShardEntry.model_validate_json(text)
    shard = directory / name
    return entry if shard.is_file() and shard.stat().st_size == entry.size_bytes else None


def remove_entries(directory: StorePath, names: list[str]) -> None:
    """Delete the shards' commit records, once the manifest holds their entries."""
    for name in names:
        _entry_path(directory, name).unlink(missing_ok=True)


def read_record(
    path: StorePath, offset: int, size: int, without: Container[str] = (), checksum: int | None = None, key: str = ""
) -> dict[str, memoryview]:
    """Return the fields of one sample, by one positioned read of its byte range in the shard.

    Args:
        without: fields that are skipped.
        checksum: xxh3_64 of the range, as in the index; None: the bytes are not checked.

    Raises:
        DamagedFile: the shard is missing or cut short, or the bytes are not this record. The text names `key`.
    """
    # The whole range is read even if fields are skipped, because the checksum covers the whole range.
    try:
        data = _InMemory(read_range(path, offset, size, checksum))
        return dict(field for _, field in _members(path, data, size, without))
    except DamagedFile as error:
        if key:
            raise DamagedFile(f"sample {key}: {error}") from error
        raise


def iter_records(path: StorePath, entry: ShardEntry | None = None) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Return an iterator over (key, fields) of every sample in a shard, in order; DamagedFile if it is not whole.

    The SHA-256 of `entry` is compared before the first sample is returned, its number of samples after the last one.
    """
    # Not a generator function: the file is compared at the call, not at the first sample.
    copy = local_copy(path, None if entry is None else entry.sha256)
    return ((key, fields) for key, _, _, fields in _iter_shard(path, copy, entry))


def iter_located(path: StorePath, entry: ShardEntry) -> Iterator[tuple[RecordRange, dict[str, bytes]]]:
    """Yield byte range, for `read_record`, and fields of every sample in a shard, in order. See `iter_records`."""
    copy = local_copy(path, entry.sha256)
    for key, offset, size, fields in _iter_shard(path, copy, entry):
        yield RecordRange(key, offset, size, xxhash.xxh3_64_intdigest(read_range(copy, offset, size))), fields


def _opened(path: StorePath, copy: Path) -> BinaryIO:
    try:
        return copy.open("rb")
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error


def _iter_shard(
    path: StorePath, copy: Path, entry: ShardEntry | None
) -> Iterator[tuple[str, int, int, dict[str, bytes]]]:
    """Yield (key, offset, size, fields) of every sample in the shard `path`; it is read from the local file `copy`."""
    key, fields = None, {}
    start = end = num_samples = 0
    with _opened(path, copy) as file:
        for member_key, (field, data) in _members(path, file):
            if key is not None and member_key != key:
                yield key, start, end - start, fields
                fields, start, num_samples = {}, end, num_samples + 1
            key = member_key
            fields[field] = data
            end = file.tell()
    if key is not None:
        yield key, start, end - start, fields
        num_samples += 1
    if entry is not None and num_samples != entry.num_samples:
        raise damaged(path, f"holds {num_samples} samples, and {MANIFEST} says {entry.num_samples}")


class _InMemory:
    """Bytes in memory with the file methods that `_members` uses; a read returns a view, not a copy."""

    def __init__(self, data: bytes) -> None:
        self._data, self._place = memoryview(data), 0

    def read(self, size: int) -> memoryview:
        self._place += size
        return self._data[self._place - size : self._place]

    def seek(self, size: int, whence: int) -> None:
        assert whence == os.SEEK_CUR
        self._place += size

    def tell(self) -> int:
        return self._place


def _members(
    path: StorePath, file: BinaryIO | _InMemory, end: int | None = None, without: Container[str] = ()
) -> Iterator[tuple[str, tuple[str, bytes | memoryview]]]:
    """Yield (key, (field, content)) of the members from the file's position up to `end`, or to the archive's end."""
    while end is None or file.tell() < end:
        header = bytes(file.read(tarfile.BLOCKSIZE))
        if header == bytes(len(header)):  # the two empty blocks at the end of the tar
            if end is not None or len(header) < tarfile.BLOCKSIZE:
                raise damaged(path, f"is cut short at byte {file.tell()}")
            return
        name, size = _parse_header(path, header)
        folder, _, base = name.rpartition("/")
        stem, _, field = base.partition(".")
        filling = -size % tarfile.BLOCKSIZE
        if field in without:
            file.seek(size + filling, os.SEEK_CUR)
            continue
        # In one piece: tarfile's own stream reads small blocks, ten times as long for a large record.
        content = file.read(size)
        if len(content) < size:
            raise damaged(path, f"is cut short in {name}")
        file.seek(filling, os.SEEK_CUR)
        yield (f"{folder}/{stem}" if folder else stem), (field, content)


def _parse_header(path: StorePath, header: bytes) -> tuple[str, int]:
    """Return (name, size) from a regular file's ustar header, in a quarter of the time of TarInfo.frombuf."""
    try:
        # The checksum counts its own field as blanks. The type 0 is a regular file; our shards hold no others.
        if sum(header) - sum(header[148:156]) + 8 * ord(" ") != int(header[148:154], 8) or header[156:157] != b"0":
            raise ValueError
        name, prefix = header[:100].rstrip(b"\0"), header[345:500].rstrip(b"\0")
        return (prefix + b"/" * bool(prefix) + name).decode(), int(header[124:135], 8)
    except ValueError as error:
        raise damaged(path, f"is damaged: {header[:60]!a} is not the header of a member") from error


def _entry_path(directory: StorePath, name: str) -> StorePath:
    return directory / f"{name}.json"
