"""Prepares this process for megatron-core: nothing to do with CUDA, the shim without it."""

import torch

if torch.cuda.is_available():
    cpu_runtime = None
else:
    from trainer.parallel import cpu_runtime


def prepare_runtime() -> None:
    """Call once, before the process group is made."""
    if cpu_runtime is not None:
        cpu_runtime.install()
