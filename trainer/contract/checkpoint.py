"""The digests by which a checkpoint is checked, without torch, before anything in it is loaded, and the choice of the
checkpoints that are kept.

athanor.json               a checkpoint's record, with the xxh3 digests of the record and of each other small file
__0_0.distcp               the state of a rank, entry by entry
__0_0.distcp.xxh3          byte offset of each entry -> its digest; a small file
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from dataset_builders.errors import damaged
from dataset_builders.storage.files import write_json

CHECKPOINT_RECORD = "athanor.json"
STATE_FILE, STATE_DIGESTS = ".distcp", ".xxh3"  # suffixes of file names
KEPT_ASIDE = "is kept aside as"  # in the trainer's line about a damaged checkpoint, which a person should see
_FILES, _OWN = "digests", "digest"  # keys of the record
STEP_NAME = re.compile(r"step-(\d{6,})")
_PIECE = 16 << 20  # bytes


def digest_of(data: bytes) -> str:
    """Return the xxh3 digest of some bytes, in the form that checkpoints store."""
    return xxhash.xxh3_64_hexdigest(data)


def checkpoints_by_step(directory: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a run, whole or not, with their steps, oldest first."""
    # By number and not by name: step-1000000 comes after step-999999.
    return sorted((int(m[1]), path) for path in directory.glob("step-*") if (m := STEP_NAME.fullmatch(path.name)))


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the whole checkpoints of a run, oldest first."""
    # The record is written last: a directory without it is not whole.
    return [path for _, path in checkpoints_by_step(directory) if (path / CHECKPOINT_RECORD).is_file()]


def checkpoints_to_delete(directory: Path, keep_last: int, keep_every: int | None) -> list[Path]:
    """Return the checkpoints that are neither among the newest nor at a step that is kept for good. See
    `CheckpointConfig`."""
    older = [(int(STEP_NAME.fullmatch(path.name)[1]), path) for path in list_checkpoints(directory)[:-keep_last]]
    return [path for step, path in older if keep_every is None or step % keep_every]


def write_checkpoint_record(checkpoint: Path, record: dict[str, Any]) -> None:
    """Write athanor.json, with digests of the checkpoint's other small files."""
    small = (path for path in checkpoint.iterdir() if path.suffix != STATE_FILE and path.name != CHECKPOINT_RECORD)
    record = record | {_FILES: {path.name: digest_of(path.read_bytes()) for path in small}}
    write_json(checkpoint / CHECKPOINT_RECORD, record | {_OWN: _digest_of_record(record)})


def read_checkpoint_record(checkpoint: Path) -> dict[str, Any]:
    """Return the content of athanor.json, after checking all small files.

    Raises:
        DamagedFile: a file is damaged or missing, or the directory is named after another step.
    """
    try:
        record = json.loads((checkpoint / CHECKPOINT_RECORD).read_bytes())
        if record.pop(_OWN, None) != _digest_of_record(record):
            raise ValueError(f"{CHECKPOINT_RECORD} is not what was written")
        for name, digest in record[_FILES].items():
            if digest_of((checkpoint / name).read_bytes()) != digest:
                raise ValueError(f"{name} is not what was written")
        if (named := STEP_NAME.fullmatch(checkpoint.name)) and record.get("step", int(named[1])) != int(named[1]):
            raise ValueError(f"it is the checkpoint of step {record['step']}")
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError) as error:
        raise damaged(checkpoint, f"is damaged ({error})") from error
    return record


def state_files(checkpoint: Path) -> list[Path]:
    """Return the files with the ranks' states that have digests in the checkpoint, sorted by name."""
    return sorted(path.with_suffix("") for path in checkpoint.glob(f"*{STATE_FILE}{STATE_DIGESTS}"))


def check_state_file(path: Path) -> str:
    """Compare each entry of a rank's state with its digest, and return the digest of the file of digests.

    Raises:
        DamagedFile: an entry differs from its digest, or the file is missing, cut or too long.
    """
    try:
        beside = path.with_name(path.name + STATE_DIGESTS).read_bytes()
        digests = {int(start): digest for start, digest in json.loads(beside).items()}
        starts = sorted(digests)
        with path.open("rb") as file:
            # An entry ends where the next one begins, so that no byte of the file is left out.
            for start, end in zip(starts, [*starts[1:], path.stat().st_size], strict=True):
                if _digest_of_part(file, start, end) != digests[start]:
                    raise ValueError(f"{path.name}: the {end - start} bytes at {start} are not what was written")
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise damaged(path.parent, f"is damaged ({error})") from error
    return digest_of(beside)


def check_checkpoint(
    checkpoint: Path,
    digest: Callable[[Path, Callable[[Path], str]], str] = lambda path, read: read(path),
    fingerprint: str | None = None,
) -> None:
    """Check that every file of a checkpoint has the content that was written.

    Args:
        digest: calls its second argument with its first, unless it already knows the result.
        fingerprint: the fingerprint of the training that the checkpoint must be of; None: any.
    """
    record = read_checkpoint_record(checkpoint)
    if fingerprint not in (None, record["fingerprint"]):
        raise damaged(checkpoint, "is a checkpoint of another training")
    for path in state_files(checkpoint):
        digest(path, check_state_file)


def _digest_of_part(file: BinaryIO, start: int, end: int) -> str:
    """Return `digest_of` the bytes from `start` to `end`, read in pieces."""
    file.seek(start)
    digest = xxhash.xxh3_64()
    while piece := file.read(min(_PIECE, end - file.tell())):
        digest.update(piece)
    return digest.hexdigest()


def _digest_of_record(record: dict[str, Any]) -> str:
    return digest_of(json.dumps(record, sort_keys=True).encode())
