"""Checks that files are still what was written: all by name and size, and those that are read whole by SHA-256.

    reused, or read by another stage   every shard and file of the manifest exists with its size, and every file that
                                       is not a shard has its SHA-256
    a model or adapter that answers    every file of its directory has its size and its SHA-256
    while it is read                   each shard or record is compared by `shard_io`

Thus only index, plan and weights are read twice, and of a million shards only the sizes are checked. If a reused
artifact is in an object store, only sizes are compared, because objects are never changed in place.

A file is digested once per state and process. The state of a file is its inode, size, time of modification and time of
change. The kernel sets the time of change at each write, and no program can set it back. A changed bit therefore
changes the state, even if size and time of modification were restored. Only a disk that returns wrong bytes leaves the
state unchanged. A stage's inputs, and a model that answers, are digested in each process, whatever an earlier process
found. An artifact that is reused is not read again while the states equal those that a `DigestCache` keeps.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dataset_builders.contracts.manifest import FileEntry, ShardEntry, file_entry
from dataset_builders.errors import MANIFEST, InputError, damaged
from dataset_builders.storage.files import sha256_file, write_json
from dataset_builders.storage.store import StorePath, is_local, local_copy, local_dir
from stages.shared.artifacts.artifact import Artifact, Input
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT

_HASHERS = 4  # files read at a time: one core digests 1.3 GB/s
_SETTLED_NS = 2 * 10**9  # a file that changed later is read each time: two writes may share one tick of the clock

_digests: dict[tuple[str, int, int], tuple[list[int], str]] = {}  # (reader, device, inode) -> state, digest


def check_inputs(inputs: Mapping[str, Input]) -> None:
    """Check a stage's inputs before it reads them: the sizes of all files of an artifact, and the digests of all its
    files except shards; of an external input, that it is the one whose digest is in the identity of what is made.

    Raises:
        DamagedFile: a file of an artifact is missing or was changed.
        InputError: a file of an external input was changed since the run began.
    """
    for item in inputs.values():
        if isinstance(item, Artifact):
            _check_sizes(item.dir, [*item.manifest.shards, *item.manifest.files])
            _check_digests(item.dir, item.manifest.files, digest_once)
            continue
        for path, state in item.states.items():
            if not path.is_file() or state_of(path) != state:
                raise InputError(
                    f"{path} was changed while this run went on; run the same command again to use it as it is now"
                )


def check_reused(artifact: Artifact, digest: Callable[[Path], str]) -> None:
    """Check that an artifact to be reused is unchanged.

    Args:
        digest: a function that returns the SHA-256 of a local file; see `DigestCache.digest`.

    Raises:
        DamagedFile: a file is missing or was changed.
    """
    _check_sizes(artifact.dir, [*artifact.manifest.shards, *artifact.manifest.files])
    if is_local(artifact.dir):
        _check_digests(artifact.dir, artifact.manifest.files, digest)


def check_written(directory: StorePath) -> None:
    """Check a model's or an adapter's directory if it belongs to an artifact: hf/, adapter/ or hf/adapter/ of an export
    or release. Files that the manifest does not list are ignored.

    Raises:
        DamagedFile: a file is missing or was changed.
    """
    owner = directory.parent
    if directory.name == ADAPTER_EXPORT and owner.name == HF_EXPORT:
        owner = owner.parent
    elif directory.name not in (HF_EXPORT, ADAPTER_EXPORT):
        return
    if not (owner / MANIFEST).is_file():
        return
    prefix = f"{str(directory)[len(str(owner)) + 1 :]}/"
    files = [entry for entry in Artifact.load(owner).manifest.files if entry.name.startswith(prefix)]
    _check_sizes(owner, files)
    _check_digests(owner, files, digest_once)


def _check_sizes(directory: StorePath, entries: Sequence[ShardEntry | FileEntry]) -> None:
    if is_local(directory):
        paths = (directory / entry.name for entry in entries)
        sizes = [path.stat().st_size if path.is_file() else None for path in paths]
    else:  # one listing, in place of a request for each of a million shards
        listed = directory.fs.find(directory.path, detail=True)
        sizes = [listed.get(f"{directory.path}/{entry.name}", {}).get("size") for entry in entries]
    for entry, size in zip(entries, sizes):
        if size is None:
            raise damaged(directory / entry.name, "is missing")
        if size != entry.size_bytes:
            raise damaged(directory / entry.name, f"has {size} bytes, and {entry.size_bytes} were written")


def _check_digests(directory: StorePath, files: Sequence[FileEntry], digest: Callable[[Path], str]) -> None:
    def check(entry: FileEntry) -> None:
        folder, _, name = entry.name.partition("/")
        if is_local(directory):
            path = directory / entry.name
        elif folder == HF_EXPORT:
            path = local_dir(directory / folder) / name  # the copy from which the model is loaded
        else:
            local_copy(directory / entry.name, entry.sha256)  # compares the SHA-256 itself
            return
        if (found := digest(path)) != entry.sha256:
            reason = f"is damaged: its SHA-256 is {found[:12]}..., and {entry.sha256[:12]}... was written"
            raise damaged(directory / entry.name, f"{reason} (to change it, copy its directory elsewhere)")

    with ThreadPoolExecutor(_HASHERS) as pool:
        list(pool.map(check, files))


def file_entries(directory: StorePath, patterns: Sequence[str], known: Iterable[FileEntry] = ()) -> list[FileEntry]:
    """Return the entries of the files that the globs match, sorted by name.

    Args:
        known: entries whose files need not be read again.
    """
    entries = {entry.name: entry for entry in known}
    paths = {str(path)[len(str(directory)) + 1 :]: path for pattern in patterns for path in directory.glob(pattern)}
    unknown = sorted(name for name in paths.keys() - entries.keys() if paths[name].is_file())
    with ThreadPoolExecutor(_HASHERS) as pool:
        entries |= {entry.name: entry for entry in pool.map(lambda name: file_entry(directory, name), unknown)}
    return [entries[name] for name in sorted(entries)]


def state_of(path: Path) -> list[int]:
    """Return the state of a file: inode, size, time of modification, time of change.

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
    found = _digests.get(key)
    if found is not None and found[0] == state:
        return found[1]
    digest = read(path)
    if time.time_ns() - max(state[2:]) > _SETTLED_NS:
        _digests[key] = (state, digest)
    return digest


class DigestCache:
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
