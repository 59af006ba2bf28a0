"""Where Python keeps its compiled modules.

An image whose packages came without them, and that lets Python write none (PYTHONDONTWRITEBYTECODE, or files of another
user), compiles every import of every process again: 10 of the 16 s that the trainer's imports took on a GPU host.
"""

import importlib.util
import os
import sys
from pathlib import Path

_WITNESS = "torch"  # every process that takes long to start imports it


def keep_bytecode() -> None:
    """Let this process and those that it starts keep compiled modules in the user's cache, if they are kept nowhere."""
    spec = None if sys.pycache_prefix else importlib.util.find_spec(_WITNESS)
    if spec is None or spec.cached is None or Path(spec.cached).is_file():
        return
    if not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK):
        return
    try:
        directory = Path.home() / ".cache" / "athanor" / "bytecode"
    except RuntimeError:  # a user without a home
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(directory), False
    os.environ |= {"PYTHONPYCACHEPREFIX": str(directory), "PYTHONDONTWRITEBYTECODE": ""}
