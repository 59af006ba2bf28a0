"""Digests of files. Each file is read once per state and process.

The state of a file is its inode, size, time of modification and time of change. The kernel sets the time of change at
each write, and no program can set it back. A changed bit therefore changes the state, even if size and time of
modification were restored. Only a disk that returns wrong bytes leaves the state unchanged. The rules for trusting a
state:

    a stage's inputs, a model that answers    read whole in each process, whatever an earlier process found
    an artifact that is reused                not read again while the states equal those of the last reading, which
                                              are kept in <root>/scratch/<stage>-<fingerprint>.whole.json

A file that changed less than two seconds ago is read each time, because two writes may share one clock tick.
"""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from dataset_builders.storage.files import sha256_file, write_json

_SETTLED_NS = 2 * 10**9

_read: dict[tuple[str, int, int], tuple[list[int], str]] = {}  # (reader, device, inode) -> state, digest


def state_of(path: Path) -> list[int]:
    """Return the state of a file.

    Raises:
        OSError: there is no such file.
    """
    about = path.stat()
    return [about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def digest_once(path: Path, read: Callable[[Path], str] = sha256_file) -> str:
    """Return `read(path)`; `read` is called again only if the file has changed since its last call.

    Raises:
        OSError: there is no such file.
    """
    device, state = path.stat().st_dev, state_of(path)
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
        place: the file that stores the digests. If it is missing or damaged, every file is read.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._kept: dict[str, list[object]] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            self._kept = dict(json.loads(place.read_bytes()).items())
        self._new: dict[str, list[object]] = {}

    def digest(self, path: Path, read: Callable[[Path], str] = sha256_file) -> str:
        """Return the digest of a file; a stored digest of the same state is used without reading. See `digest_once`."""
        state = state_of(path)
        kept = self._kept.get(str(path))
        digest = kept[-1] if isinstance(kept, list) and kept[:-1] == state else digest_once(path, read)
        if time.time_ns() - max(state[2:]) > _SETTLED_NS:
            self._new[str(path)] = [*state, digest]
        return str(digest)

    def keep(self) -> None:
        """Write the digests, unless the root is not writable."""
        if self._new != self._kept:
            with contextlib.suppress(OSError):
                self._place.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._place, self._new)
