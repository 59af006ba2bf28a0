"""Objects that are imported when they are used, so that a model's description needs neither torch nor megatron."""

import importlib
from typing import Any


def load(name: str) -> Any:
    """Return the object that "module:name" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
