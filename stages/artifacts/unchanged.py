"""Digests of files, each file read whole once per state and process.

The state of a file is its inode, size, time of modification and time of change. The kernel sets the time of change at
each write, and no program can set it back. A changed bit therefore makes another state, also where size and time of
modification were restored. Only a disk that returns other bytes than were written keeps the state. How far a state is
trusted:

    a stage's inputs, a model that is asked   read whole in each process, whatever an earlier process found
    an artifact that is reused                not read again while the states are those of the last whole reading; they
                                              are kept in <root>/scratch/<stage>-<fingerprint>.whole.json

A file that changed less than two seconds ago is read each time: two writes may share one tick of the clock.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from dataset_builders.storage.files import sha256_file, write_json

_SETTLED_NS = 2 * 10**9

_read: dict[tuple[str, int, int], tuple[list[int], str]] = {}  # (reader, device, inode) -> state, digest


def _state(path: Path) -> tuple[int, list[int]]:
    about = path.stat()
    return about.st_dev, [about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def digest_once(path: Path, read: Callable[[Path], str] = sha256_file) -> str:
    """Return what `read` returns for a file; it is called again only if the file has changed since.

    Raises:
        OSError: there is no such file.
    """
    device, state = _state(path)
    key = (read.__qualname__, device, state[0])
    found = _read.get(key)
    if found is not None and found[0] == state:
        return found[1]
    digest = read(path)
    if time.time_ns() - max(state[2:]) > _SETTLED_NS:
        _read[key] = (state, digest)
    return digest


class Whole:
    """The digests of an artifact's files, kept between processes.

    Args:
        place: the file that keeps them. A file that is missing or damaged makes every file be read.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._kept: dict[str, list[object]] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            self._kept = dict(json.loads(place.read_bytes()).items())
        self._new: dict[str, list[object]] = {}

    def digest(self, path: Path, read: Callable[[Path], str] = sha256_file) -> str:
        """See `digest_once`; a kept digest of the same state is taken without reading."""
        _, state = _state(path)
        kept = self._kept.get(str(path))
        digest = kept[-1] if isinstance(kept, list) and kept[:-1] == state else digest_once(path, read)
        if time.time_ns() - max(state[2:]) > _SETTLED_NS:
            self._new[str(path)] = [*state, digest]
        return str(digest)

    def keep(self) -> None:
        """Write the digests. A root that cannot be written keeps none."""
        if self._new != self._kept:
            with contextlib.suppress(OSError):
                self._place.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._place, self._new)
