"""The cache of Python's compiled modules.

Some container images have packages without compiled modules and do not let Python write any (PYTHONDONTWRITEBYTECODE
is set, or the files belong to another user). There, every process compiles every module that it imports: 10 of the
16 s that the trainer's imports took on a GPU host.
"""

import importlib.util
import os
import sys
from pathlib import Path

_WITNESS = "torch"  # every process that takes long to start imports it


def keep_bytecode() -> None:
    """Let this process and its child processes keep compiled modules in the user's cache, if they are not kept yet."""
    spec = None if sys.pycache_prefix else importlib.util.find_spec(_WITNESS)
    if spec is None or spec.cached is None or Path(spec.cached).is_file():
        return
    if not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK):
        return
    try:
        directory = Path.home() / ".cache" / "athanor" / "bytecode"
    except RuntimeError:  # the user has no home directory
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(directory), False
    os.environ |= {"PYTHONPYCACHEPREFIX": str(directory), "PYTHONDONTWRITEBYTECODE": ""}
