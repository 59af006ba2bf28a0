"""Where raw rows come from: a stage's artifact, a directory of the user's, or a dataset of the Hugging Face hub."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import sha256_file, write_json
from stages.artifact import External

_NO_NETWORK = (LocalEntryNotFoundError, ConnectionError, TimeoutError, OSError)


def open_raw(source: str, subsets: Sequence[str], memo: Path | None = None) -> External:
    """The raw data as a stage input, downloaded if `source` is a hub dataset and not a directory here.

    Args:
        source: a directory that holds `<subset>/*.parquet`, or a hub name: HuggingFaceM4/the_cauldron.
        subsets: which subsets are read; a hub dataset needs at least one, a directory takes none as all.
        memo: a file that remembers digests by size and time of change, so that a big source is read once.

    Raises:
        InputError: no such directory, no such dataset, or no way to reach the hub.
    """
    directory = Path(source).expanduser()
    if not directory.is_dir():
        if source.startswith(("/", ".", "~")) or source.count("/") != 1:
            raise InputError(f"raw data directory {source} does not exist; give a directory or a hub name (owner/name)")
        directory = _download(source, subsets)
    return External(directory, "raw", content_digest(directory, subsets, memo))


def content_digest(directory: Path, subsets: Sequence[str], memo: Path | None = None) -> str:
    """16 hex digits over names and bytes of the files of these subsets (none: of all), whatever a builder reads."""
    known = json.loads(memo.read_text(encoding="utf-8")) if memo is not None and memo.is_file() else {}
    names = sorted(subsets) if subsets else sorted(d.name for d in directory.iterdir() if d.is_dir())
    total = hashlib.sha256()
    seen: dict[str, str] = {}
    for path in (path for name in names for path in _files(directory / name)):
        stat = path.stat()
        stamp = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        seen[stamp] = known.get(stamp) or sha256_file(path)
        total.update(f"{path.relative_to(directory)}\0{seen[stamp]}\n".encode())
    if memo is not None and not seen.items() <= known.items():
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_json(memo, known | seen)
    return total.hexdigest()[:16]


def _files(directory: Path) -> list[Path]:
    """The files below a subset's folder, in a fixed order; hidden ones are some tool's, not data."""
    return sorted(p for p in directory.rglob("*") if p.is_file() and not p.name.startswith("."))


def _download(name: str, subsets: Sequence[str]) -> Path:
    if not subsets:
        raise InputError(f"hub dataset {name} needs subsets to download, for example subsets=[ai2d]")
    patterns = [f"{subset}/*.parquet" for subset in subsets]
    try:
        directory = Path(huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(f"raw data {name!r} is no directory here and no dataset of the hub; check the name") from error
    except (HfHubHTTPError, *_NO_NETWORK) as error:
        if isinstance(error, OSError) and error.errno == 28:  # a full disk has its own message
            raise
        why = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else str(error).split("\n")[0][:160]
        raise InputError(
            f"raw data {name!r} is no directory here and the hub cannot be reached ({why}); "
            "give a directory of <subset>/*.parquet, or get online and run the same command again"
        ) from error
    missing = [subset for subset in subsets if not any((directory / subset).glob("*.parquet"))]
    if missing:
        raise InputError(f"hub dataset {name} has no subset {missing[0]!r}; see https://huggingface.co/datasets/{name}")
    return directory
