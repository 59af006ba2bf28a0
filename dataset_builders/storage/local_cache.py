"""A bounded cache, on this machine's disk, of bytes that were read from object stores. Every hit is checked.

    $ATHANOR_CACHE_DIR (default ~/.cache/athanor)
        ranges/ab/<key>    8 bytes of checksum and the bytes of one range
        files/ab/<key>/    one whole file under its own name, and a file with its checksum
        uploads/           files that are being uploaded
        roots/             local files of a root in a store: locks and unfinished work; in tree/, a copied directory

Ranges, files and trees together take at most $ATHANOR_CACHE_GB (default 20). The least recently used entries are
deleted first. A tree is kept for at least a day after its last use, because programs open its files one by one. Several
processes share the cache without locks: entries appear by a rename, and a missing or damaged entry is fetched again.
"""

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from dataset_builders.errors import InputError

_CHECK_EVERY = 1 / 16  # share of the bound that a process adds before it checks the size of the whole cache
_KEEP = 0.9  # share of the bound that remains after a clean-up
_CHECKSUM_BYTES = 8
TREE, WHOLE = "tree", ".whole"  # a copied directory, and the file in it that marks it as complete
_TREE_KEPT = 86_400.0  # seconds that a tree is kept after its last use

_added: dict[Path, int] = {}  # bytes that this process has added since its last check


def cache_dir() -> Path:
    """Return the directory of all data that can be fetched again."""
    return Path(os.environ.get("ATHANOR_CACHE_DIR") or Path.home() / ".cache" / "athanor")


def cache_bound() -> int:
    """Return the number of bytes that the cache may take."""
    text = os.environ.get("ATHANOR_CACHE_GB") or "20"
    try:
        bound = int(float(text) * 1e9)
    except ValueError:
        bound = 0
    if bound <= 0:
        raise InputError(f"ATHANOR_CACHE_GB={text} is not a positive number of gigabytes; try ATHANOR_CACHE_GB=20")
    return bound


class LocalCache:
    """The cache below `directory`, limited to `bound` bytes."""

    def __init__(self, directory: Path | None = None, bound: int | None = None) -> None:
        self.directory = directory or cache_dir()
        self.bound = bound or cache_bound()

    def read(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """Return the bytes of a key; fetch them if they are missing or damaged in the cache."""
        place = self._place("ranges", key)
        try:
            stored = place.read_bytes()
        except OSError:
            stored = b""
        data = stored[_CHECKSUM_BYTES:]
        if len(stored) >= _CHECKSUM_BYTES and xxhash.xxh3_64_digest(data) == stored[:_CHECKSUM_BYTES]:
            _touch(place)
            return data
        data = fetch()
        if len(data) <= self.bound * _CHECK_EVERY:  # one larger range would push out everything else
            tmp = path_beside(place)
            tmp.write_bytes(xxhash.xxh3_64_digest(data) + data)
            os.replace(tmp, place)
            self.count(len(data))
        return data

    def file(self, key: str, name: str, download: Callable[[Path], None]) -> Path:
        """Return a local file `name` with the content of a key; download it if the cached one is missing or damaged."""
        place = self._place("files", key)
        file, record = place / name, place / (name + ".xxh3")
        if file.is_file() and record.is_file() and record.read_text() == _checksum(file):
            _touch(record)
            return file
        place.mkdir(exist_ok=True)
        tmp = path_beside(file)
        try:
            download(tmp)
            checksum, size = _checksum(tmp), tmp.stat().st_size
            os.replace(tmp, file)
        finally:
            tmp.unlink(missing_ok=True)
        tmp = path_beside(record)
        tmp.write_text(checksum)
        os.replace(tmp, record)
        self.count(size)
        return file

    def _place(self, kind: str, key: str) -> Path:
        name = xxhash.xxh3_128_hexdigest(key.encode())
        place = self.directory / kind / name[:2] / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def count(self, size: int) -> None:
        """Record that bytes were added to the cache, and delete old entries if the cache is over its bound."""
        _added[self.directory] = _added.get(self.directory, 0) + size
        if _added[self.directory] > self.bound * _CHECK_EVERY:
            _added[self.directory] = 0
            self._make_room()

    def _make_room(self) -> None:
        """Delete the least recently used entries until `_KEEP` of the bound is left."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        if total <= self.bound * (1 - _CHECK_EVERY):  # every process may add its share before it checks again
            return
        for used, size, place in entries:
            if total <= self.bound * (_KEEP - _CHECK_EVERY):
                return
            if place.name == TREE and used > time.time() - _TREE_KEPT:
                continue
            shutil.rmtree(place, ignore_errors=True) if place.is_dir() else place.unlink(missing_ok=True)
            total -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (last use, bytes, path) of every entry."""
        places = [place for kind in ("ranges", "files") for place in (self.directory / kind).glob("??/*")]
        trees = (self.directory / "roots").glob(f"*/{TREE}")
        for place in (*places, *(tree for tree in trees if (tree / WHOLE).is_file())):
            try:
                parts = [part for part in place.rglob("*") if part.is_file()] if place.is_dir() else [place]
                stats = [part.stat() for part in parts]
            except FileNotFoundError:  # another process deletes entries too
                continue
            if stats:
                yield max(s.st_mtime for s in stats), sum(s.st_size for s in stats), place


def _touch(place: Path) -> None:
    try:
        os.utime(place)
    except OSError:  # deleted since it was read
        return


def path_beside(place: Path) -> Path:
    """Return a path in the same directory for a temporary file, which no other writer uses."""
    return place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.tmp")


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
