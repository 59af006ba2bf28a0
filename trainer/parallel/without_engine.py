"""Faster gradient clipping for megatron-core 0.16.1 on a GPU without Transformer Engine and apex. There its gradient
norm waits for the GPU once per tensor, and its scaling copies each gradient."""

import torch
from megatron.core.optimizer import clip_grads


def _norm(chunk_size: int, flag: torch.Tensor, lists: list, per_tensor: bool) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors of the first list, (1,) float32."""
    return torch.nn.utils.get_total_norm(lists[0]).float().view(1), None


def _scale(chunk_size: int, flag: torch.Tensor, lists: list, scale: float | torch.Tensor) -> None:
    """Set the second list to the first list * scale; megatron-core passes the same list twice."""
    source, target = lists
    if source is not target:
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, scale)


def patch_clipping() -> None:
    """Make megatron-core clip gradients without waiting, until the process ends."""
    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale
