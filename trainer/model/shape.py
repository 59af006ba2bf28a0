"""The sizes of a model, read once from its config.json, for memory, layouts, FLOPs and weights.

A family's `shape.py` returns a `ModelShape`; nothing here loads torch. A decoder or an encoder of another kind is a
subclass that computes its own parameters and FLOPs.
"""

from dataclasses import dataclass
from typing import NamedTuple

# Loss tokens whose logits exist at a time; trainer/layers/output_loss.py gives the reason for the number.
LOSS_CHUNK = 4096
# Tokens of a chunk of the gated delta rule: matrix products inside it, a recurrence from chunk to chunk.
DELTA_CHUNK = 64


class Work(NamedTuple):
    """The work in a bin, by the kinds that cost differently; or arrays, for many bins.

    Attributes:
        tokens: of the linear layers of the language model.
        loss_tokens: tokens whose logits are computed.
        tokens_squared: sum over samples of length^2; that only the causal half is computed is in the coefficient.
        patches: of the vision encoder.
        patches_squared: sum over images of patches^2.
    """

    tokens: float
    loss_tokens: float
    tokens_squared: float
    patches: float
    patches_squared: float

    def without_images(self) -> "Work":
        """The same where the vision encoder has nothing to do."""
        return self._replace(patches=0, patches_squared=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """A language model: grouped-query attention and a gated MLP in every layer, norms before each.

    Attributes:
        activation: of the MLP's gate, in transformers' spelling.
        mrope_section: rotary pairs of each of three position axes; None: positions have one axis.
        zero_centred_norms: RMSNorm multiplies by 1 + weight.
        gated_attention: each query head has a gate, which its output is multiplied by; the gates are projected with
            the queries.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    rope_theta: float
    tie_word_embeddings: bool
    mrope_section: tuple[int, int, int] | None = None
    zero_centred_norms: bool = False
    gated_attention: bool = False

    @property
    def rotary_dim(self) -> int:
        """The position turns so many numbers of a head, the first ones."""
        return self.head_dim

    @property
    def in_chunks(self) -> bool:
        """Whether some layers take a bin's segments in chunks."""
        return False

    def divided_widths(self) -> dict[str, int]:
        """The widths that tensor-parallel ranks divide, by their names in messages."""
        names = ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")
        return {name: getattr(self, name) for name in names}

    def context_divided_widths(self) -> dict[str, int]:
        """Those that context-parallel ranks divide, after the tensor-parallel ranks."""
        return {}

    def layer_parameters(self, number: int) -> int:
        """Parameters of a layer, counted from 0."""
        attention = self._projections() + self._output_projection() + 2 * self.head_dim
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    def kept_numbers(self, number: int, *, selective: bool) -> int:
        """Numbers per token that the attention of a layer, counted from 0, keeps for backward in its heads: queries,
        keys, values and output are about four hidden sizes; a gate adds itself and the output that it multiplies.

        Args:
            selective: the core is computed again, see `recompute`.
        """
        return 4 * self.hidden_size + (2 * self.num_heads * self.head_dim if self.gated_attention else 0)

    @property
    def parameters(self) -> int:
        """Parameters of embedding, layers, final norm and output projection; a tied weight counts once."""
        layers = sum(self.layer_parameters(number) for number in range(self.num_layers))
        matrices = 1 if self.tie_word_embeddings else 2
        return layers + self.hidden_size + matrices * self.vocab_size * self.hidden_size

    def layer_flops(self, number: int) -> tuple[int, int, int]:
        """Forward FLOPs of a layer per token: up to its attention, after it, and of attention per token^2 of a sample,
        the causal half."""
        mlp = 6 * self.hidden_size * self.intermediate_size
        return 2 * self._projections(), 2 * self._output_projection() + mlp, 2 * self.num_heads * self.head_dim

    @property
    def forward_flops(self) -> dict[str, int]:
        """FLOPs per unit of each kind of work, by the names of `trainer.data.balance.CostModel`. Only loss tokens have
        logits, and in the last layer a part after the attention."""
        layers = [self.layer_flops(number) for number in range(self.num_layers)]
        after = sum(layer[1] for layer in layers[:-1])
        return {
            "per_token": sum(layer[0] for layer in layers) + after,
            "per_loss_token": layers[-1][1] + 2 * self.hidden_size * self.vocab_size,
            "per_token_squared": sum(layer[2] for layer in layers),
        }

    def _projections(self) -> int:
        per_query = 2 if self.gated_attention else 1
        return self.hidden_size * (per_query * self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def _output_projection(self) -> int:
        return self.hidden_size * self.num_heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """A vision encoder whose layers have biases and LayerNorms, with a merger that turns patches into image tokens.

    Attributes:
        out_hidden_size: width of an image token.
        num_positions: rows of the table of learned positions, a square.
        deepstack_layers: layers whose output, merged, is added to the language model's first layers; may be empty.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_positions: int
    deepstack_layers: tuple[int, ...]
    rope_theta: float
    activation: str

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def position_side(self) -> int:
        """The side of the square of learned positions."""
        return int(self.num_positions**0.5)

    def divided_widths(self) -> dict[str, int]:
        """The widths that tensor-parallel ranks divide with vision_split=tensor_parallel. The merger's width is a
        multiple of the heads."""
        return {"vision_num_heads": self.num_heads, "vision_intermediate_size": self.intermediate_size}

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters of the encoder and of its mergers."""
        width, inner = self.hidden_size, self.intermediate_size
        patch = 3 * self.temporal_patch_size * self.patch_size**2
        attention = (3 * width + 3) * width + (width + 1) * width
        layer = 2 * 2 * width + attention + (width + 1) * inner + (inner + 1) * width
        encoder = patch * width + width + self.num_positions * width + self.num_layers * layer
        merged = width * self.spatial_merge_size**2
        merger = (merged + 1) * merged + (merged + 1) * self.out_hidden_size
        mergers = merger + 2 * width + len(self.deepstack_layers) * (merger + 2 * merged)
        return {"vision": encoder, "merger": mergers}

    @property
    def forward_flops(self) -> dict[str, int]:
        """FLOPs per unit of each kind of work, by the names of `trainer.data.balance.CostModel`."""
        embedding = 2 * 3 * self.patch_size**2 * self.hidden_size
        layer = 2 * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)
        # One product per merged block of patches: (merged, merged), then (merged, out); shared by the block's patches.
        merger = 2 * self.hidden_size * (self.hidden_size * self.spatial_merge_size**2 + self.out_hidden_size)
        return {
            "per_patch": embedding + self.num_layers * layer + (1 + len(self.deepstack_layers)) * merger,
            "per_patch_squared": self.num_layers * 4 * self.hidden_size,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTokens:
    """The ids that mark the images of a prompt."""

    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A whole model.

    Attributes:
        vision, images: both None for a model of text alone.
    """

    language: DecoderShape
    vision: VisionShape | None = None
    images: ImageTokens | None = None

    @property
    def num_deepstack(self) -> int:
        """The number of first language layers after which a feature of the vision encoder is added."""
        return 0 if self.vision is None else len(self.vision.deepstack_layers)

    @property
    def feature_width(self) -> int:
        """Numbers that the vision encoder gives of an image token: its own, then those of each deepstack level."""
        return (1 + self.num_deepstack) * self.language.hidden_size

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters of each part of the model."""
        vision = {} if self.vision is None else self.vision.parameters
        return {**vision, "language": self.language.parameters}

    @property
    def forward_flops(self) -> dict[str, int]:
        """FLOPs per unit of each kind of work, by the names of `trainer.data.balance.CostModel`."""
        vision = {"per_patch": 0, "per_patch_squared": 0} if self.vision is None else self.vision.forward_flops
        return self.language.forward_flops | vision
