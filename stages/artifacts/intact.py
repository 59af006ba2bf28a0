"""Whether an artifact is still what was written: its files by name and size, and those that are read whole by SHA-256.

    reused, or read by another stage   every shard and file of the manifest is there and has its size
    read by another stage              every file beside the shards has its SHA-256, before the stage begins
    while it is read                   each shard or record is compared by `shard_io`

So nothing is read twice but index, plan and weights, and a million shards are only counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from dataset_builders.contracts.manifest import FileEntry, file_entry
from dataset_builders.errors import damaged
from dataset_builders.storage.files import sha256_file
from dataset_builders.storage.store import StorePath, is_local, local_copy, local_dir
from stages.artifacts.artifact import Artifact, Input
from trainer.contract.names import HF_EXPORT

_HASHERS = 4  # files read at a time: one core digests 1.3 GB/s


def file_entries(directory: StorePath, patterns: Sequence[str], known: Iterable[FileEntry] = ()) -> list[FileEntry]:
    """The entries of the files that the globs match, by name.

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
    """Check that every shard and file of the manifest is there with its size.

    Raises:
        DamagedFile: one is not.
    """
    entries = [*artifact.manifest.shards, *artifact.manifest.files]
    for entry, size in zip(entries, _sizes(artifact.dir, [entry.name for entry in entries])):
        if size is None:
            raise damaged(artifact.dir / entry.name, "is missing")
        if size != entry.size_bytes:
            raise damaged(artifact.dir / entry.name, f"has {size} bytes, and {entry.size_bytes} were written")


def check_inputs(inputs: Mapping[str, Input]) -> None:
    """Check what a stage is about to read: sizes of all files, and the digests of those beside the shards.

    Raises:
        DamagedFile: a file is missing, or is not the one that was written.
    """
    for item in inputs.values():
        if isinstance(item, Artifact):
            check_sizes(item)
            with ThreadPoolExecutor(_HASHERS) as pool:
                list(pool.map(lambda entry, item=item: _check_file(item.dir, entry), item.manifest.files))


def _check_file(directory: StorePath, entry: FileEntry) -> None:
    folder, _, name = entry.name.partition("/")
    if is_local(directory) or folder != HF_EXPORT:
        local_copy(directory / entry.name, entry.sha256)
    elif (digest := sha256_file(local_dir(directory / folder) / name)) != entry.sha256:  # the copy that is used
        what = f"is damaged: its SHA-256 is {digest[:12]}..., and {entry.sha256[:12]}... was written"
        raise damaged(directory / entry.name, what)


def _sizes(directory: StorePath, names: Sequence[str]) -> list[int | None]:
    """The bytes of each file below a directory; None for one that is missing."""
    if not is_local(directory):
        found = directory.fs.find(directory.path, detail=True)
        return [found.get(f"{directory.path}/{name}", {}).get("size") for name in names]
    paths = (directory / name for name in names)
    return [path.stat().st_size if path.is_file() else None for path in paths]
