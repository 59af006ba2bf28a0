"""The decision whether our Triton kernels run, made only here. trainer/contract/modules.py lists what they need."""

from functools import cache

import torch

from trainer.contract.modules import KERNEL_CAPABILITY

_HOPPER = 9
_allowed = True


def can_import() -> bool:
    """Whether the kernels' modules can be imported, which requires Triton."""
    return torch.cuda.is_available()


def allow_kernels(allowed: bool) -> None:
    """Set whether this process's models use our kernels from now on."""
    global _allowed
    _allowed = allowed


def kernels_run(device: torch.device) -> bool:
    """Whether our kernels compute on a device: a GPU of at least KERNEL_CAPABILITY, in a job that may use them."""
    return _allowed and device.type == "cuda" and _capability(device) >= KERNEL_CAPABILITY


def hopper_kernels_run(device: torch.device) -> bool:
    """Whether the delta rule's kernels compute on a device: they are tested on Hopper, not on newer GPUs."""
    return kernels_run(device) and _capability(device)[0] == _HOPPER


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
