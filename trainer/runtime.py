"""Prepares this process for megatron-core: nothing to do on CUDA, the shim where there is none."""

import torch

if torch.cuda.is_available():
    cpu_runtime = None
else:
    from trainer import cpu_runtime


def prepare_runtime() -> None:
    """Call once, before the process group is made."""
    if cpu_runtime is not None:
        cpu_runtime.install()
