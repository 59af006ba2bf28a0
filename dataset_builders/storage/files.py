"""Files that are written atomically: under another name, then published by a rename or an upload. Also, readers of
files that may be damaged or half written: JSON, lines and logs that other processes append to, SQLite databases."""

import contextlib
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import xxhash

from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.store import StorePath, cache_dir, is_local, path_beside, publish

MAX_LOG_BYTES = 50_000_000
_SQLITE_SECONDS = 1.0  # for another process that holds the database
_RUINED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@contextlib.contextmanager
def atomic_path(path: StorePath) -> Iterator[Path]:
    """Give a temporary local path; publish its file as `path` when the block ends without an error."""
    tmp = temporary_path(path)
    try:
        yield tmp
        publish(tmp, path)
    finally:
        tmp.unlink(missing_ok=True)


def temporary_path(path: StorePath) -> Path:
    """Return a path for a file before it is published as `path`: in the same directory, or for a store in the cache."""
    if is_local(path):
        return path_beside(path)
    uploads = cache_dir() / "uploads"
    uploads.mkdir(parents=True, exist_ok=True)
    return path_beside(uploads / path.name)


def write_text(path: StorePath, text: str) -> None:
    """Write `text` as UTF-8 so that a reader sees either the whole old file or the whole new one."""
    with atomic_path(path) as tmp, tmp.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # before the rename, or a machine that stops could leave an empty file


def write_json(path: StorePath, value: object) -> None:
    """Write `value` as indented JSON with sorted keys, atomically; the same value gives the same bytes."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def write_sealed(path: StorePath, text: str) -> None:
    """Write `text` atomically below a line with its digest, for `read_sealed`."""
    write_text(path, f"{xxhash.xxh3_64_hexdigest(text.encode())}\n{text}")


def read_sealed(path: StorePath) -> str | None:
    """Return the text that `write_sealed` wrote; None, so that a rerun makes it again, if it is missing or changed."""
    if not path.is_file():
        return None
    seal, _, text = path.read_bytes().partition(b"\n")
    return text.decode() if seal == xxhash.xxh3_64_hexdigest(text).encode() else None


def read_object(path: StorePath, way_out: str) -> dict[str, Any]:
    """Read the object of a JSON file that may be foreign or damaged; `way_out` ends the text of the InputError."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a file")  # the reading of a pipe would never end
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise InputError(f"{path} cannot be read as JSON (nested too deeply); {way_out}") from error
    except (OSError, ValueError) as error:  # includes text that is not UTF-8, and integers of thousands of digits
        why = "it is empty" if path.is_file() and not path.stat().st_size else one_line(error)
        raise InputError(f"{path} cannot be read as JSON ({why}); {way_out}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a {type(value).__name__}, not an object; {way_out}")
    return value


def check_directory(path: Path) -> None:
    """Raise an InputError if something other than a directory stands where a directory is needed."""
    if os.path.lexists(path) and not path.is_dir():
        raise InputError(f"{path} is not a directory, and one is needed there; move it away")


def sha256_file(path: StorePath) -> str:
    """Return the 64 hex digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class GrowingFile:
    """Reader of the lines that other processes append to a local file; each complete line is returned once.

    A file that was truncated, or replaced by another, is read from its start.
    """

    def __init__(self, path: Path, taken: int = 0) -> None:
        self.path, self.taken = path, taken  # taken: the number of bytes in the lines that were taken
        self._end, self._inode = taken, 0

    def new_lines(self) -> bytes:
        """Return the data after the lines that were taken, up to the last line break; empty if there is no file."""
        if not self.path.is_file():
            return b""
        with self.path.open("rb") as file:
            about = os.fstat(file.fileno())
            if self._inode not in (0, about.st_ino) or about.st_size < self.taken:
                self.taken = 0
            self._inode = about.st_ino
            file.seek(self.taken)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        self._end = self.taken + len(whole)
        return whole

    def take(self) -> None:
        """Mark the lines that `new_lines` last returned as taken, so that they are not returned again."""
        self.taken = self._end


def trim_log(path: Path) -> bool:
    """Move what a long log holds to `moved_log`; return whether it was long. A writer that appends continues at the
    start of the file."""
    if not path.exists() or path.stat().st_size <= MAX_LOG_BYTES:
        return False
    with path.open("rb") as log, moved_log(path).open("wb") as moved:
        # Up to the end as it is then, right before the cut: what is written between the two is lost.
        while data := log.read(1 << 20):
            moved.write(data)
        os.truncate(path, 0)
    return True


def moved_log(path: Path) -> Path:
    """Return the file that holds the beginning of a long log."""
    return path.with_name(path.name + ".1")


def check_database(path: Path, lost: str) -> None:
    """Check a whole SQLite database, if there is one and no other process holds it. `lost` is its content, in words."""
    if not path.exists():
        return
    if not all(os.access(place, os.W_OK) for place in (path, path.parent)):
        raise InputError(f"{path} or its directory cannot be written; permit it, or choose another --root")
    verdict = "it is no file"
    if path.is_file():
        try:
            address = f"file:{quote(str(path))}?mode=rw"
            with contextlib.closing(sqlite3.connect(address, _SQLITE_SECONDS, uri=True)) as database:
                (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
                verdict = " ".join(verdict.split())
        except sqlite3.DatabaseError as error:  # also when another process holds it, which is no fault
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # an extended code has more bits
            verdict = str(error) if code in _RUINED else "ok"
    if verdict != "ok":
        raise InputError(
            f"{path} is no whole SQLite database ({verdict}); put a copy in its place, or move {path}* away: a new one "
            f"is made, without {lost}"
        )
