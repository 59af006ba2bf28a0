"""Marks for tests that need GPUs."""

import importlib.util
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

F = TypeVar("F", bound=Callable)


requires_engine = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed"
)
# The sets of modules on CUDA, for tests that run with each of them.
ON_CUDA = [pytest.param("engine", marks=requires_engine), "plain", "portable"]


def requires_gpus(count: int) -> Callable[[F], F]:
    """Skip a test unless this machine has `count` GPUs. Also mark it `gpu`."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    skip = pytest.mark.skipif(available < count, reason=f"needs {count} GPUs, this machine has {available}")
    return lambda test: pytest.mark.gpu(skip(test))
