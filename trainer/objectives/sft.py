"""Supervised fine-tuning: the sum of the loss tokens' losses, and their number."""

import torch


def loss_of(
    losses: torch.Tensor, lengths: tuple[int, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | tuple[int, ...]]]:
    """Return the three-tuple of `calculate_per_token_loss`: sum of losses, number of loss tokens, report.

    megatron-core divides the gradient by the loss tokens of the whole global batch, over all ranks and micro batches.

    Args:
        lengths: loss tokens of each sample; if given, the report also has these lengths and the losses.
    """
    total = losses.sum()
    count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)  # torch.tensor waits for the device
    report = {"loss_and_tokens": torch.stack([total.detach().double(), count.double()])}
    return total, count, report | ({} if lengths is None else {"losses": losses.detach(), "loss_lengths": lengths})
