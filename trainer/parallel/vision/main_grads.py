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
    """Add a parameter's gradient to its float32 sum, as megatron-core's data parallelism does.

    A fused product has added to the sum by itself: it sets the mark or, in a recomputed layer, where it sees another
    tensor than the parameter, returns no gradient.
    """
    if param.grad is not None and not param.grad_added_to_main_grad:
        param.main_grad.add_(param.grad)
    param.grad = None
