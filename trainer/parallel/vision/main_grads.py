"""Gradients of weights that are summed in float32, beside the parameter."""

import torch


def fuse_gradients(module: torch.nn.Module) -> None:
    """Let the product of a weight's gradient add to the weight's float32 `main_grad` by itself, where it can.

    Not on a CPU, where two bins must give the same bits on one rank and on two (tests): there each bin's gradient is
    one addition.
    """
    for part in module.modules() if torch.cuda.is_available() else ():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = True


def add_to_main_grad(param: torch.nn.Parameter) -> None:
    """As megatron-core's data parallelism does: a product may have added to it already."""
    if not param.grad_added_to_main_grad:
        param.main_grad.add_(param.grad)
    param.grad = None
