"""Shards: plain WebDataset tars whose bytes depend on their samples alone. One record is read by its offset.

A shard is written under a temporary name, published when whole, and then committed by `<name>.json` beside it,
a ShardEntry. A rerun in the same work directory skips every shard that has its entry.
"""

import hashlib
import json
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
from dataset_builders.storage.files import temporary_path, write_json
from dataset_builders.storage.store import StorePath, local_copy, make_dir, publish, read_range


@dataclass(frozen=True, slots=True)
class RecordRange:
    """Where one sample's members lie in a shard: bytes [offset, offset + size), whose xxh3_64 is `checksum`."""

    key: str
    offset: int
    size: int
    checksum: int


class ShardWriter:
    """Writes one shard. Members are `key.field`; no time, owner or host enters the bytes.

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
        """Append one sample, and return where it lies."""
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
        end = self._offset + 2 * tarfile.BLOCKSIZE  # two empty blocks, filled up to a whole record
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
        write_json(_entry_path(self.directory, self.name), entry.model_dump(mode="json"))
        return entry

    def _append(self, block: bytes) -> None:
        self._sha256.update(block)
        self._file.write(block)
        self._offset += len(block)


def _member(name: str, data: bytes) -> tuple[bytes, bytes, bytes]:
    """Header, content and filling of one member, byte for byte what webdataset's TarWriter writes."""
    return _header(name, len(data)), data, bytes(-len(data) % tarfile.BLOCKSIZE)


def _header(name: str, size: int) -> bytes:
    """The ustar header of a plain file (POSIX.1-1988, pax(1)): name, octal size at 124, checksum at 148."""
    if (
        len(name) > 100 or not name.isascii()
    ):  # the name needs two fields or a member of its own: rare, and tarfile knows how
        return _tar_info(name, size).tobuf(tarfile.USTAR_FORMAT)
    header = bytearray(_HEADER)
    header[: len(name)] = name.encode()
    header[124:135] = b"%011o" % size
    header[148:156] = b"%06o\0 " % sum(header)  # summed over blanks in the checksum's own place, as in _HEADER
    return bytes(header)


def _tar_info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o444, 0
    info.uname = info.gname = "athanor"
    return info


_HEADER = bytearray(_tar_info("", 0).tobuf(tarfile.USTAR_FORMAT))
_HEADER[148:156] = b" " * 8


def finished_shard(directory: StorePath, name: str) -> ShardEntry | None:
    """The entry of a shard that an earlier, interrupted try committed in this directory; None if there is none."""
    path = _entry_path(directory, name)
    if not path.is_file():
        return None
    entry = ShardEntry.model_validate(json.loads(path.read_text()))
    shard = directory / name
    return entry if shard.is_file() and shard.stat().st_size == entry.size_bytes else None


def remove_entries(directory: StorePath, names: list[str]) -> None:
    """Delete the commit records beside the shards, once the manifest holds them."""
    for name in names:
        _entry_path(directory, name).unlink(missing_ok=True)


def read_record(
    path: StorePath, offset: int, size: int, without: Container[str] = (), checksum: int | None = None, key: str = ""
) -> dict[str, memoryview]:
    """The fields of one sample, by one positioned read of its byte range in the shard.

    The range is read whole, also for a caller that passes over fields, for its checksum is one of the whole.

    Args:
        without: fields that are passed over.
        checksum: of the range, as in the index; None: an old record of places has none.
        key: the sample's, for messages.

    Raises:
        DamagedFile: the shard is missing or cut short, or the bytes are not those of a record with this checksum.
    """
    try:
        data = _InMemory(read_range(path, offset, size, checksum))
        return dict(field for _, field in _members(path, data, size, without))
    except DamagedFile as error:
        if key:
            raise DamagedFile(f"sample {key}: {error}") from error
        raise


def iter_records(path: StorePath, entry: ShardEntry | None = None) -> Iterator[tuple[str, dict[str, bytes]]]:
    """(key, fields) of every sample in a shard, in order.

    Args:
        entry: of the manifest. The shard's SHA-256 is compared before the first sample is given, the number of its
            samples after the last.

    Raises:
        DamagedFile: the shard is missing, cut short or damaged, or is not the one of the entry.
    """
    return ((key, fields) for key, _, _, fields in _iter_shard(path, _checked_copy(path, entry), entry))


def iter_located(path: StorePath, entry: ShardEntry) -> Iterator[tuple[RecordRange, dict[str, bytes]]]:
    """Every sample in a shard, in order: its place for `read_record`, and its fields; else as `iter_records`."""
    copy = _checked_copy(path, entry)
    for key, offset, size, fields in _iter_shard(path, copy, entry):
        yield RecordRange(key, offset, size, xxhash.xxh3_64_intdigest(read_range(copy, offset, size))), fields


def _checked_copy(path: StorePath, entry: ShardEntry | None) -> Path:
    return local_copy(path, None if entry is None else entry.sha256)


def _opened(path: StorePath, copy: Path) -> BinaryIO:
    try:
        return copy.open("rb")
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error


def _iter_shard(
    path: StorePath, copy: Path, entry: ShardEntry | None
) -> Iterator[tuple[str, int, int, dict[str, bytes]]]:
    """(key, offset, size, fields) of every sample in the shard `path`, whose bytes lie in `copy`."""
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
    """Bytes in memory with the methods of a file that `_members` uses; what it reads is not copied."""

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
    """(key, (field, content)) of the members from the file's position up to `end`, or to the archive's own end.

    Each content is read in one piece: tarfile's own stream goes through small blocks, which costs a large record ten
    times as much. Shards hold plain files with names that fit a header, nothing else.
    """
    while end is None or file.tell() < end:
        header = bytes(file.read(tarfile.BLOCKSIZE))
        if header == bytes(len(header)):  # the two empty blocks of the end
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
        content = file.read(size)
        if len(content) < size:
            raise damaged(path, f"is cut short in {name}")
        file.seek(filling, os.SEEK_CUR)
        yield (f"{folder}/{stem}" if folder else stem), (field, content)


def _parse_header(path: StorePath, header: bytes) -> tuple[str, int]:
    """(name, size) of a plain file's ustar header, at a quarter of the cost of TarInfo.frombuf.

    Raises:
        DamagedFile: the checksum is not that of the header's bytes, or the member is not a plain file.
    """
    try:
        if sum(header) - sum(header[148:156]) + 8 * ord(" ") != int(header[148:154], 8) or header[156:157] != b"0":
            raise ValueError
        name, prefix = header[:100].rstrip(b"\0"), header[345:500].rstrip(b"\0")
        return (prefix + b"/" * bool(prefix) + name).decode(), int(header[124:135], 8)
    except ValueError as error:
        raise damaged(path, f"is damaged: {header[:60]!a} is not the header of a member") from error


def _entry_path(directory: StorePath, name: str) -> StorePath:
    return directory / f"{name}.json"
