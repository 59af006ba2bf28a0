"""What megatron-core 0.16.1 does slowly on a GPU where it finds neither Transformer Engine nor apex: the norm of the
gradients, for which it waits for the GPU once a tensor, and their scaling, with a copy of each."""

import torch
from megatron.core.optimizer import clip_grads


def _norm(chunk_size: int, flag: torch.Tensor, lists: list, per_tensor: bool) -> tuple[torch.Tensor, None]:
    """(1,) float32: the norm of all tensors of the first list."""
    return torch.nn.utils.get_total_norm(lists[0]).float().view(1), None


def _scale(chunk_size: int, flag: torch.Tensor, lists: list, scale: float | torch.Tensor) -> None:
    """Second list = first list * scale; megatron-core gives the same list twice."""
    source, target = lists
    if source is not target:
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, scale)


def patch_clipping() -> None:
    """Have megatron-core clip gradients without waiting, until the process ends."""
    clip_grads.l2_norm_impl, clip_grads.multi_tensor_scale_impl = _norm, _scale
