"""Sums of weight gradients in float32, in a buffer of their own."""

import torch


def fuse_gradients(module: torch.nn.Module) -> None:
    """Let the matrix product of a weight's gradient add to the weight's float32 `main_grad` directly, where it can."""
    # Not on a CPU: there tests need the same bits from two bins on one rank and on two ranks, so each bin's gradient is
    # one addition.
    for part in module.modules() if torch.cuda.is_available() else ():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = True


def add_to_main_grad(param: torch.nn.Parameter) -> None:
    """Add a parameter's gradient to its float32 sum, as megatron-core's data parallelism does."""
    # A fused product has already added to the sum, and has set the flag. In a recomputed layer, where the product sees
    # a tensor other than the parameter, it returns no gradient instead.
    if param.grad is not None and not param.grad_added_to_main_grad:
        param.main_grad.add_(param.grad)
    param.grad = None
