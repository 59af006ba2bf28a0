"""Supervised fine-tuning: the sum of the loss tokens' losses, and their number, with multi-token prediction's."""

import torch


def loss_of(
    losses: torch.Tensor,
    lengths: tuple[int, ...] | None = None,
    *,
    num_loss_tokens: int | None = None,
    mtp_factor: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor | tuple[int, ...]]]:
    """Return the three-tuple of `calculate_per_token_loss`: sum of losses, number of loss tokens, report.

    megatron-core divides the gradient by the loss tokens of the whole global batch, over all ranks and micro batches.

    Args:
        losses: (N,), then (M,) of multi-token prediction if its factor is not 0.
        lengths: loss tokens of each sample; if given, the report also has these lengths and the losses.
        num_loss_tokens: N; None: all losses.
    """
    losses, second = losses.tensor_split((len(losses) if num_loss_tokens is None else num_loss_tokens,))
    total = losses.sum()
    count = torch.full((), losses.numel(), dtype=torch.int, device=losses.device)  # torch.tensor waits for the device
    sums = [total.detach().double(), count.double()]
    if mtp_factor:
        # Also divided by N, as in megatron-core: there are as many of these losses, but for the second token of a
        # sample.
        second_total = second.sum()
        sums += [second_total.detach().double(), torch.full_like(sums[1], second.numel())]
        total = total + mtp_factor * second_total
    report = {"loss_and_tokens": torch.stack(sums)}
    return total, count, report | ({} if lengths is None else {"losses": losses.detach(), "loss_lengths": lengths})
