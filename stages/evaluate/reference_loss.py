"""Loss and perplexity of the reference answers, from the losses that the trainer wrote for every held-out sample."""

import math
from collections.abc import Collection, Mapping

from trainer.contract.answer import HeldoutRow

LOSS, PERPLEXITY = "reference_loss", "reference_perplexity"
_LARGEST = 700.0  # exp of more is not a float64


def reference_loss(losses: Mapping[str, HeldoutRow], keys: Collection[str]) -> dict[str, float]:
    """The mean loss over the loss tokens of these samples, in nats per token, and its exponential.

    Samples that are in no bin (too long) do not count; empty if no token is left.
    """
    rows = [losses[key] for key in set(keys) if key in losses]
    tokens = sum(row.loss_tokens for row in rows)
    if not tokens:
        return {}
    loss = math.fsum(row.loss * row.loss_tokens for row in rows if row.loss is not None) / tokens
    return {LOSS: loss, PERPLEXITY: math.exp(min(loss, _LARGEST))}
