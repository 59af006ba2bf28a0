"""Loss and perplexity of the reference answers, from the losses that the trainer wrote for each held-out sample."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from dataset_builders.contracts.sample import whole_key
from stages.shared.scoring.names import LOSS, PERPLEXITY
from trainer.contract.result import HeldoutRow

_LARGEST = 700.0  # exp of a larger number is not a float64


def by_sample(rows: Iterable[HeldoutRow]) -> dict[str, HeldoutRow]:
    """Return key of a sample -> its loss; for a cut conversation, the mean over all its parts."""
    parts: dict[str, list[HeldoutRow]] = {}
    for row in rows:
        parts.setdefault(whole_key(row.key), []).append(row)
    return {
        key: HeldoutRow(key=key, loss=_mean_loss(of_key), loss_tokens=sum(row.loss_tokens for row in of_key))
        if len(of_key) > 1
        else of_key[0]
        for key, of_key in parts.items()
    }


def reference_loss(losses: Mapping[str, HeldoutRow], keys: Collection[str]) -> dict[str, float]:
    """Return the mean loss over the loss tokens of these samples, in nats per token, and its exponential.

    Samples that are in no bin (too long) are not counted; the result is empty if no token is left.
    """
    rows = [losses[key] for key in set(keys) if key in losses]
    loss = _mean_loss(rows)
    return {} if loss is None else {LOSS: loss, PERPLEXITY: math.exp(min(loss, _LARGEST))}


def _mean_loss(rows: Sequence[HeldoutRow]) -> float | None:
    tokens = sum(row.loss_tokens for row in rows)
    return math.fsum(row.loss * row.loss_tokens for row in rows if row.loss is not None) / tokens if tokens else None
