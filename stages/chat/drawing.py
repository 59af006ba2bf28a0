"""Draws a token by its probability, for one answer, whatever else is in the batch."""

import torch


class Drawing:
    """Chooses each token of one answer at random, by its logits.

    Args:
        temperature: greater than 0; the logits are divided by it.
        top_p: only the most probable tokens are drawn whose probabilities reach this sum together.
        seed: equal seeds draw equal answers from equal logits; None: a new one.
    """

    def __init__(self, temperature: float, top_p: float = 1.0, seed: int | None = None) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._random = torch.Generator()
        self._random.seed() if seed is None else self._random.manual_seed(seed)

    def __call__(self, logits: torch.Tensor) -> int:
        """Return a token; `logits` is (V,)."""
        probabilities, tokens = (logits.double() / self._temperature).softmax(-1).sort(descending=True)
        count = int(((probabilities.cumsum(-1) - probabilities) < self._top_p).sum())
        reached = probabilities[:count].cumsum(-1)
        place = torch.searchsorted(reached, torch.rand((), generator=self._random).item() * reached[-1])
        return int(tokens[min(int(place), count - 1)])
