"""Checks that an artifact is unchanged: all files by name and size, and files that are read whole by SHA-256.

    reused, or read by another stage   every shard and file of the manifest exists with its size, and every file that
                                       is not a shard has its SHA-256 (see unchanged.py for which files are read)
    a model or adapter that answers    every file of its directory has its size and its SHA-256
    while it is read                   each shard or record is compared by `shard_io`

Thus only index, plan and weights are read twice, and of a million shards only the sizes are checked. If a reused
artifact is in an object store, only sizes are compared, because objects are never changed in place.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dataset_builders.contracts.manifest import FileEntry, file_entry
from dataset_builders.errors import MANIFEST, InputError, damaged
from dataset_builders.storage.store import StorePath, is_local, local_copy, local_dir
from stages.shared.artifacts.artifact import Artifact, Input
from stages.shared.artifacts.unchanged import digest_once, state_of
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT

_HASHERS = 4  # files read at a time: one core digests 1.3 GB/s


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


def check_sizes(artifact: Artifact) -> None:
    """Check that every shard and file of the manifest exists with its size.

    Raises:
        DamagedFile: a file is missing or has another size.
    """
    entries = [*artifact.manifest.shards, *artifact.manifest.files]
    for entry, size in zip(entries, _sizes(artifact.dir, [entry.name for entry in entries])):
        if size is None:
            raise damaged(artifact.dir / entry.name, "is missing")
        if size != entry.size_bytes:
            raise damaged(artifact.dir / entry.name, f"has {size} bytes, and {entry.size_bytes} were written")


def check_inputs(inputs: Mapping[str, Input]) -> None:
    """Check a stage's inputs before it reads them: the sizes of all files of an artifact, and the digests of all its
    files except shards; of an external input, that it is the one whose digest is in the identity of what is made.

    Raises:
        DamagedFile: a file of an artifact is missing or was changed.
        InputError: a file of an external input was changed since the run began.
    """
    for item in inputs.values():
        if isinstance(item, Artifact):
            check_sizes(item)
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
        digest: a function that returns the SHA-256 of a local file; see `Whole.digest`.

    Raises:
        DamagedFile: a file is missing or was changed.
    """
    check_sizes(artifact)
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
    artifact, prefix = Artifact.load(owner), f"{str(directory)[len(str(owner)) + 1 :]}/"
    files = [entry for entry in artifact.manifest.files if entry.name.startswith(prefix)]
    check_sizes(Artifact(owner, artifact.manifest.model_copy(update={"files": files, "shards": []})))
    _check_digests(owner, files, digest_once)


def _check_digests(directory: StorePath, files: Sequence[FileEntry], digest: Callable[[Path], str]) -> None:
    with ThreadPoolExecutor(_HASHERS) as pool:
        list(pool.map(lambda entry: _check_file(directory, entry, digest), files))


def _check_file(directory: StorePath, entry: FileEntry, digest: Callable[[Path], str]) -> None:
    folder, _, name = entry.name.partition("/")
    if not is_local(directory) and folder != HF_EXPORT:
        local_copy(directory / entry.name, entry.sha256)
        return
    path = directory / entry.name if is_local(directory) else local_dir(directory / folder) / name  # the copy in use
    if (digest_found := digest(path)) != entry.sha256:
        reason = f"is damaged: its SHA-256 is {digest_found[:12]}..., and {entry.sha256[:12]}... was written"
        raise damaged(directory / entry.name, f"{reason} (to change it, copy its directory elsewhere)")


def _sizes(directory: StorePath, names: Sequence[str]) -> list[int | None]:
    """Return the size in bytes of each file below a directory; None for a missing file."""
    if not is_local(directory):
        found = directory.fs.find(directory.path, detail=True)
        return [found.get(f"{directory.path}/{name}", {}).get("size") for name in names]
    paths = (directory / name for name in names)
    return [path.stat().st_size if path.is_file() else None for path in paths]
