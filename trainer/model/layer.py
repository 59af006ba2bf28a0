"""The description of a decoder layer without torch: a mixer of tokens, then a feed-forward network.

    hidden += mixer(norm(hidden));  hidden += feed_forward(norm(hidden))

A part (`trainer/parts/`) is a subclass of `Mixer` or `FeedForward`. Memory, FLOPs, layouts, adapters and weights are
sums over the parts of the layers, so no code for them names a kind of part.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from trainer.model.rules import Rule


class LayerFlops(NamedTuple):
    """Forward FLOPs of a layer."""

    before: int  # FLOPs per token, up to and including the mixing of tokens
    # FLOPs per token, after the mixing. In the last layer only loss tokens are computed there.
    after: int
    squared: int  # FLOPs per token^2 of a sample


class Part(ABC):
    """One half of a layer."""

    # "module:function" that returns the megatron-core spec of the half: (part, set of modules) -> ModuleSpec
    spec: ClassVar[str]
    role: ClassVar[str]  # name by which `train.adapter.targets` selects the linear layers of the part

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of parameters, without the norm before the part."""

    @abstractmethod
    def saved_activations(self, *, selective: bool) -> int:
        """Return the number of values per token that the part saves for backward in addition to its input. A value has
        two bytes in a training in bfloat16, so a float32 value counts twice.

        Args:
            selective: whether the core of the part is recomputed in backward, see `recompute`.
        """

    @abstractmethod
    def rules(self, ours: str, hf: str) -> Iterator[Rule]:
        """Yield the table of the part's weights.

        Args:
            ours: prefix of our names: "language.decoder.layers.0.".
            hf: prefix of Hugging Face's names: "model.language_model.layers.0.".
        """

    def divided_widths(self) -> dict[str, int]:
        """Return the widths that tensor-parallel ranks divide, by their names in messages."""
        return {}

    def context_divided_widths(self) -> dict[str, int]:
        """Return the widths that context-parallel ranks divide, after the tensor-parallel ranks."""
        return {}

    def expert_divided_widths(self) -> dict[str, int]:
        """Return the widths that expert-parallel ranks divide."""
        return {}

    def transformer_settings(self) -> Mapping[str, Any]:
        """Return the fields of megatron-core's TransformerConfig that the part sets; `activation` is by name."""
        return {}


class Mixer(Part):
    """The first half of a layer, which mixes the tokens of a segment: attention, or a part that replaces attention."""

    in_chunks: ClassVar[bool] = False  # whether the mixer takes a bin's segments in chunks, as a delta net does
    # "module:function" that refuses a device on which the part computes wrong results: (part, dtype, device) -> None.
    # It runs before any weight is read. Empty: no check.
    check_device: ClassVar[str] = ""

    @property
    @abstractmethod
    def flops(self) -> LayerFlops:
        """Forward FLOPs; `after` is the output projection."""


class FeedForward(Part):
    """The second half of a layer, which computes every token independently."""

    # whether the part must know which tokens are padding, and routes all tokens also in the last layer, where only the
    # tokens trained on are computed
    routes_tokens: ClassVar[bool] = False

    @property
    def expert_parameters(self) -> int:
        """Number of the parameters that expert-parallel ranks divide. Tensor-parallel ranks do not divide them."""
        return 0

    def expert_activations(self, *, selective: bool) -> int:
        """Return the number of those `saved_activations` that experts save; expert-parallel ranks have those of each
        other's tokens too."""
        return 0

    @property
    def transient_activations(self) -> int:
        """Values per token that exist only while the backward of one layer runs, if they are not negligible;
        expert-parallel ranks have those of each other's tokens too."""
        return 0

    @property
    def inactive_parameters(self) -> int:
        """Number of the parameters that a token does not use."""
        return 0

    @property
    @abstractmethod
    def flops(self) -> int:
        """Forward FLOPs per token."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with a norm before each half."""

    width: int  # hidden size, the width of the norms
    mixer: Mixer
    feed_forward: FeedForward

    @property
    def halves(self) -> tuple[Part, Part]:
        return self.mixer, self.feed_forward

    @property
    def parameters(self) -> int:
        """Number of parameters, both norms included."""
        return self.mixer.parameters + self.feed_forward.parameters + 2 * self.width

    @property
    def flops(self) -> LayerFlops:
        """Forward FLOPs of both halves."""
        before, after, squared = self.mixer.flops
        return LayerFlops(before, after + self.feed_forward.flops, squared)  # every feed-forward comes after the mixing

    def saved_activations(self, *, selective: bool) -> int:
        """Return the number of values per token that both halves save for backward in addition to their inputs."""
        return sum(half.saved_activations(selective=selective) for half in self.halves)

    def rules(self, ours: str, hf: str) -> Iterator[Rule]:
        """Yield the table of the layer's weights in Hugging Face's order."""
        yield Rule(ours + "input_layernorm.weight", (hf + "input_layernorm.weight",))
        yield from self.mixer.rules(ours, hf)
        yield Rule(ours + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",))
        yield from self.feed_forward.rules(ours, hf)

    @property
    def largest_matrix(self) -> int:
        """Number of elements of the largest matrix of the layer."""
        return max(rule.numbers for rule in self.rules("", ""))


@dataclass(frozen=True, slots=True)
class MultiTokenPrediction:
    """Multi-token prediction (MTP): a layer that predicts the token after the next, with which inference servers draft
    tokens; see `MultiTokenPredictor` in `trainer/layers/decoder.py` for its formula.

    It is a projection of a hidden state and an embedding to the model's width, a layer, and three norms. Embedding and
    output projection are the model's own.
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

    def saved_activations(self, *, selective: bool) -> int:
        """Return the number of values per token that are saved for backward in addition to the inputs of the halves."""
        # Those of the layer, the inputs of two norms, and the input of the projection, which is twice as wide.
        return self.layer.saved_activations(selective=selective) + 4 * self.layer.width

    def rules(self) -> Iterator[Rule]:
        """Yield the table of weights in Hugging Face's order."""
        yield Rule("language.mtp.fc", ("mtp.fc.weight",))
        yield from self.layer.rules("language.mtp.layer.", "mtp.layers.0.")
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield Rule(f"language.mtp.{norm}.weight", (f"mtp.{norm}.weight",))
