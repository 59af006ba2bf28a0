"""A root is its owner's alone: no other user of the machine reads data, logs, answers or databases in it.

`flows/__init__.py`, the trainer and the workers of answers set a umask, so that each file is made private too.
"""

import stat
import tempfile
from pathlib import Path

from dataset_builders.errors import InputError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private_root(root: Path) -> str | None:
    """Make the directory of a root, or take away the rights of others to an existing one.

    A directory with the sticky bit, as /tmp, is meant for everybody and stays as it is; what is made in it is private.

    Returns:
        a line for a person if the rights of others were taken away, or could not be; else None.

    Raises:
        InputError: the directory cannot be made, or nothing can be written there.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            mode = stat.S_IMODE(root.stat().st_mode)
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
