"""Marks for tests that need GPUs."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

F = TypeVar("F", bound=Callable)


def requires_gpus(count: int) -> Callable[[F], F]:
    """Skip unless this machine has `count` GPUs; also marks the test `gpu`."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    skip = pytest.mark.skipif(available < count, reason=f"needs {count} GPUs, this machine has {available}")
    return lambda test: pytest.mark.gpu(skip(test))
