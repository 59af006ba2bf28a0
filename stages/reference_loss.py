"""Loss and perplexity of the reference answers: what the trainer wrote of every held-out sample, teacher-forced."""

import math
from collections.abc import Collection, Mapping

from dataset_builders.contracts.store import StorePath
from trainer.contract import HeldoutRow, read_heldout

LOSS, PERPLEXITY = "reference_loss", "reference_perplexity"
_LARGEST = 700.0  # exp of more is no float64


def losses_of(path: StorePath) -> dict[str, HeldoutRow]:
    """Key of the sample -> its line of a heldout.jsonl; nothing where the training had no held-out bins."""
    return {row.key: row for row in read_heldout(path)}


def reference_loss(losses: Mapping[str, HeldoutRow], keys: Collection[str]) -> dict[str, float]:
    """The mean loss over the loss tokens of these samples, in nats a token, and its exponential.

    Samples that the trainer was not given (too long for a bin) are not in it; nothing where that leaves no token.
    """
    rows = [losses[key] for key in set(keys) if key in losses]
    tokens = sum(row.loss_tokens for row in rows)
    if not tokens:
        return {}
    loss = math.fsum(row.loss * row.loss_tokens for row in rows if row.loss is not None) / tokens
    return {LOSS: loss, PERPLEXITY: math.exp(min(loss, _LARGEST))}
