"""The multi-token prediction (MTP) of a model, described without torch: a layer that predicts the token after the next.

Inference servers draft tokens with it. See `MultiTokenPredictor` in `trainer/layers/decoder.py` for its formula.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.model.layer import Layer, LayerFlops
from trainer.model.rules import Rule

_OURS, _HF = "language.mtp.", "mtp."


@dataclass(frozen=True, slots=True)
class MultiTokenPrediction:
    """A projection of a hidden state and an embedding to the model's width, a layer, and three norms.

    Embedding and output projection are the model's own.
    """

    layer: Layer

    @property
    def undivided(self) -> int:
        """Number of the parameters that no ranks divide: the projection and the norms."""
        width = self.layer.width
        return 2 * width * width + 3 * width

    @property
    def parameters(self) -> int:
        return self.undivided + self.layer.parameters

    @property
    def flops(self) -> LayerFlops:
        """Forward FLOPs of the projection and the layer, without logits; only loss tokens need `after`."""
        before, after, squared = self.layer.flops
        return LayerFlops(4 * self.layer.width**2 + before, after, squared)

    def kept_numbers(self, *, selective: bool) -> int:
        """Return the number of values per token that are kept for backward in addition to the inputs of the halves."""
        # Those of the layer, the inputs of two norms, and the input of the projection, which is twice as wide.
        return self.layer.kept_numbers(selective=selective) + 4 * self.layer.width

    def rules(self) -> Iterator[Rule]:
        """Yield the table of weights in Hugging Face's order."""
        yield Rule(_OURS + "fc", (_HF + "fc.weight",))
        yield from self.layer.rules(_OURS + "layer.", _HF + "layers.0.")
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield Rule(f"{_OURS}{norm}.weight", (f"{_HF}{norm}.weight",))
