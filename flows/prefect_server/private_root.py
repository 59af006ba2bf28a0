"""Makes a root private to its owner: no other user of the machine may read data, logs, answers or databases in it.

`flows/__init__.py`, the trainer and the answer workers also set a umask, so that each new file is private.
"""

import contextlib
import shutil
import stat
import tempfile
from pathlib import Path

from dataset_builders.errors import InputError
from dataset_builders.readers.source_files import ROOT_MARK

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private_root(root: Path) -> str | None:
    """Make the directory of a root with its mark, or remove the permissions of others from an existing directory.

    A directory with the sticky bit, such as /tmp, is meant for everybody and keeps its mode. Files in it are private.

    Returns:
        a line for the user if permissions of others were removed or could not be removed; else None.

    Raises:
        InputError: the directory cannot be made, or no file can be written in it.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            mode = stat.S_IMODE(root.stat().st_mode)
        (root / ROOT_MARK).touch()
    except OSError as error:
        raise InputError(f"--root {root} cannot be written ({error.strerror}); choose another root") from error
    if not mode & _OTHERS or mode & stat.S_ISVTX:
        return None
    try:
        root.chmod(mode & ~_OTHERS)
    except OSError:
        return (
            f"--root {root} is open to other users (mode {mode:o}) and belongs to user {root.stat().st_uid}, who alone "
            f"can close it: chmod 700 {root}"
        )
    return f"--root {root} was open to other users (mode {mode:o}); it is now its owner's alone (mode 700)"


def remove_unused_root(root: Path) -> None:
    """Remove the directory of a new root that holds no file except its mark."""
    with contextlib.suppress(OSError):
        if all(path.is_dir() or path.name == ROOT_MARK for path in root.rglob("*")):
            shutil.rmtree(root)
