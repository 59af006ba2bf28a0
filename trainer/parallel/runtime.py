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


def fuse_gradients(module: torch.nn.Module) -> None:
    """Let the product of a weight's gradient add to the weight's float32 `main_grad` by itself, where it can.

    Not on a CPU, where two bins must give the same bits on one rank and on two (tests): there each bin's gradient is
    one addition.
    """
    for part in module.modules() if torch.cuda.is_available() else ():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = True
