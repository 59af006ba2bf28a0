"""Preparation of this process for megatron-core: without CUDA it installs the CPU shim, with CUDA it does nothing."""

import torch

if torch.cuda.is_available():
    cpu_runtime = None
else:
    from trainer.parallel import cpu_runtime


def prepare_runtime() -> None:
    """Prepare this process. Call it once, before the process group is made."""
    if cpu_runtime is not None:
        cpu_runtime.install()
