"""The user's raw rows: in a directory, a file, below a URL, or in a dataset of the hub.

Raw data is identified by a digest of the files that the builder reads: on a disk, of their names and bytes; in an
object store, of their names, sizes and ETags, so that nothing has to be downloaded. The digest includes all files below
the source that rows may name as images, but no images elsewhere.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import get_session

from dataset_builders.errors import InputError
from dataset_builders.readers.image_refs import MEDIA_PATTERNS, may_be_image
from dataset_builders.readers.parts import natural_order
from dataset_builders.readers.source_files import MEDIA_SUFFIXES, SourceFile, list_files
from dataset_builders.sources.registry import check_hub_subsets, get_builder
from dataset_builders.storage.files import read_object, sha256_file, write_json
from dataset_builders.storage.store import StorePath, check_reachable, is_local, location
from stages.shared.artifacts.artifact import External

_HASHERS = 4  # files read at a time: SHA-256 is faster than most disks


def open_raw(source: str, subsets: Sequence[str], builder: str, memo: Path | None = None) -> External:
    """Return the raw data as a stage input; download it if `source` is a hub dataset.

    Args:
        source: a directory or a file, local or a URL, or a hub name: HuggingFaceM4/the_cauldron.
        subsets: the subsets to read; none means all.
        memo: a file that stores digests by size and time of change, so that a large source is read only once.
    """
    patterns = get_builder(builder).patterns(subsets)
    path = location(source)
    if not is_local(path):
        check_reachable(path)
        files = _readable(path, patterns)
        if not _has_rows(files, builder):
            raise InputError(f"raw data {path} holds no file that the builder {builder} reads; check the address")
        return External(path, "raw", _digest((file.name, file.stored) for file in files))
    if not path.exists():
        if source.startswith(("/", ".", "~")) or source.count("/") != 1:
            raise InputError(f"raw data directory {source} does not exist; give a directory or a hub name (owner/name)")
        path = _download(source, subsets, builder)
    return External(path, "raw", content_digest(path, patterns, memo))


def content_digest(source: Path, patterns: Sequence[str], memo: Path | None = None) -> str:
    """Return 16 hex digits over names and bytes of the files that the patterns match."""

    def stamp(path: Path) -> str:  # a text that changes when the file changes, without reading the file
        stat = path.stat()
        # No program can set the time of change back, as `cp -p` and `touch -r` set the time of modification.
        return f"{os.path.abspath(path)}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ctime_ns}|{stat.st_ino}"

    def sha256(path: Path) -> str:
        try:
            return sha256_file(path)
        except PermissionError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error

    files = _readable(source, patterns)
    stamps = [stamp(file.path) for file in files]
    digests: dict[str, str] = {}
    if memo is not None and memo.is_file():
        with contextlib.suppress(InputError):  # a damaged memo: every file is read again
            digests = {key: digest for key, digest in read_object(memo, "").items() if isinstance(digest, str)}
    to_read = {key: file.path for key, file in zip(stamps, files) if key not in digests}
    with ThreadPoolExecutor(_HASHERS) as pool:
        digests |= zip(to_read, pool.map(sha256, to_read.values()))
    if memo is not None and to_read:
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_json(memo, digests)
    return _digest((file.name, digests[key]) for key, file in zip(stamps, files))


def _readable(source: StorePath, patterns: Sequence[str]) -> list[SourceFile]:
    """Return the files that the patterns match and, where rows may name images, all files that a row may name."""
    files = list_files(source, patterns)
    if set(MEDIA_PATTERNS) <= set(patterns):
        known, is_file = {file.name for file in files}, source.is_file()
        top = source.parent if is_file else source
        below = list_files(top, ("*", "**/*"), refuses_links_out=not is_file)  # files beside a file may be others'
        files += [file for file in below if may_be_image(file.name) and file.name not in known]
    return files


def _digest(files: Iterable[tuple[str, str]]) -> str:
    total = hashlib.sha256()
    for name, content in files:
        total.update(f"{name}\0{content}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()[:16]


def _has_rows(files: Sequence[SourceFile], builder: str) -> bool:
    if get_builder(builder).images_are_rows:
        return bool(files)
    return any(not file.name.lower().endswith(MEDIA_SUFFIXES) for file in files)


def _download(name: str, subsets: Sequence[str], builder: str) -> Path:
    """Return the newest snapshot of a hub dataset in the hub's own cache, with the files of these subsets."""
    check_hub_subsets(name, subsets)
    patterns = get_builder(builder).patterns(subsets)
    with _hub_errors(name):
        directory = Path(huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=list(patterns)))
    for chosen in [[subset] for subset in subsets] or [[]]:
        if not _has_rows(list_files(directory, get_builder(builder).patterns(chosen)), builder):
            what = f"subset {chosen[0]!r}" if chosen else "file"
            where = f"see https://huggingface.co/datasets/{name}"
            raise InputError(f"hub dataset {name} has no {what} that the builder {builder} reads; {where}")
    return directory


def download_first(name: str, suffixes: Sequence[str]) -> tuple[Path, list[str]]:
    """Download a snapshot of a hub dataset with only its first file of rows, which has one of the suffixes. Return the
    snapshot, and the names of all such files in the dataset, the downloaded one first."""
    with _hub_errors(name):
        _reach_hub()
        names = huggingface_hub.HfApi().list_repo_files(name, repo_type="dataset")
        rows = sorted((each for each in names if each.endswith(tuple(suffixes))), key=natural_order)
        if not rows:
            raise InputError(f"hub dataset {name} has no file of {', '.join(suffixes)}; download it and see what it is")
        directory = huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=rows[:1])
    return Path(directory), rows


def _reach_hub() -> None:
    """Raise OSError if the hub does not answer one request. A listing would be tried six times, for 24 seconds."""
    try:
        if not os.environ.get("HF_HUB_OFFLINE"):
            get_session().head(huggingface_hub.constants.ENDPOINT, timeout=20)
    except Exception as error:  # of the library below the hub's client, which is not always the same
        raise OSError(str(error)) from error


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Convert errors of the hub's client to InputError with the way out."""
    try:
        yield
    except GatedRepoError as error:
        page = f"https://huggingface.co/datasets/{name}"
        raise InputError(f"hub dataset {name} is gated: accept its terms at {page}, then `hf auth login`") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(
            f"raw data {name!r} is neither a directory here nor a dataset of the hub; check the name"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        if isinstance(error, OSError) and error.errno == 28:  # a full disk has its own message
            raise
        why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else str(error).split("\n")[0][:160]
        raise InputError(
            f"raw data {name!r} is not a directory here, and the hub cannot be reached ({why}); "
            "give a directory, or get online and run the same command again"
        ) from error
