"""The sizes of a model, read once from its config.json, for memory, layouts, FLOPs and weights.

A family's `read_shape` returns a `ModelShape`; nothing here loads torch. Layers of another kind have their own parts,
see `trainer.model.layer`.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trainer.contract.run import TrainConfig
from trainer.model.layer import Layer, LayerFlops, Mixer, MultiTokenPrediction, Part
from trainer.model.rules import LAYERS, Rule

# Number of loss tokens whose logits exist at a time; for the reason see trainer/layers/vocabulary.py.
LOSS_CHUNK = 4096
# Tokens per chunk of the gated delta rule: matrix products inside a chunk, a recurrence from chunk to chunk.
DELTA_CHUNK = 64


class Work(NamedTuple):
    """The work in a bin, by kinds with different costs; or arrays, for many bins."""

    tokens: float  # tokens in the linear layers of the language model
    loss_tokens: float  # tokens whose logits are computed
    tokens_squared: float  # sum over samples of length^2; the cost per unit accounts for the causal half
    patches: float  # patches in the vision encoder
    patches_squared: float  # sum over images, and over temporal groups of videos, of patches^2

    def without_images(self) -> "Work":
        """Return the same work without the vision encoder's."""
        return self._replace(patches=0, patches_squared=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """A language model: an embedding, layers with a norm before each half, a norm and an output projection."""

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    rope_theta: float
    rotary_dim: int  # number of leading components of each attention head that are rotated
    tie_word_embeddings: bool
    # number of rotary pairs of each of three position axes; None if positions have one axis
    mrope_section: tuple[int, int, int] | None = None
    zero_centred_norms: bool = False  # whether RMSNorm multiplies by 1 + weight
    mtp: MultiTokenPrediction | None = None  # the multi-token prediction that is trained; None: none is

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def parts(self) -> list[Part]:
        """The different halves of the layers and of the layer of multi-token prediction, each once, in their order."""
        layers = [*self.layers, *([] if self.mtp is None else [self.mtp.layer])]
        return list(dict.fromkeys(half for layer in layers for half in layer.halves))

    @property
    def mixers(self) -> list[Mixer]:
        """The different mixers of the layers, each once."""
        return list(dict.fromkeys(layer.mixer for layer in self.layers))

    @property
    def in_chunks(self) -> bool:
        """Whether some layers take a bin's segments in chunks."""
        return any(mixer.in_chunks for mixer in self.mixers)

    @property
    def routes_tokens(self) -> bool:
        """Whether a feed-forward part of some layer routes tokens."""
        return any(layer.feed_forward.routes_tokens for layer in self.layers)

    def divided_widths(self) -> dict[str, int]:
        """Return the widths that tensor-parallel ranks divide, by their names in messages."""
        # The order decides which of several wrong widths an error names: those of the layers, the vocabulary, and last
        # those that context-parallel ranks divide too.
        widths = {name: size for part in self.parts for name, size in part.divided_widths().items()}
        shared, own = self.context_divided_widths(), {"vocab_size": self.vocab_size}
        return {name: size for name, size in widths.items() if name not in shared} | own | shared

    def context_divided_widths(self) -> dict[str, int]:
        return {name: size for part in self.parts for name, size in part.context_divided_widths().items()}

    def expert_divided_widths(self) -> dict[str, int]:
        return {name: size for part in self.parts for name, size in part.expert_divided_widths().items()}

    @property
    def parameters(self) -> int:
        """Number of parameters of embedding, layers, final norm, output projection and trained multi-token prediction.
        A tied weight counts once."""
        layers = sum(layer.parameters for layer in self.layers) + (0 if self.mtp is None else self.mtp.parameters)
        matrices = 1 if self.tie_word_embeddings else 2  # embedding and output projection
        return layers + self.hidden_size + matrices * self.vocab_size * self.hidden_size

    @property
    def largest_matrix(self) -> int:
        """Number of elements of the largest matrix of a layer."""
        # Equal layers are equal values: a table of weights for each different layer is enough.
        return max(layer.largest_matrix for layer in dict.fromkeys(self.layers))

    @property
    def layer_flops(self) -> list[LayerFlops]:
        """Forward FLOPs of each layer, and after them of the multi-token prediction that is trained."""
        return [layer.flops for layer in self.layers] + ([] if self.mtp is None else [self.mtp.flops])

    @property
    def forward_flops(self) -> dict[str, int]:
        """FLOPs per unit of each kind of work, by the names of `trainer.data.balance.CostModel`."""
        layers = self.layer_flops
        # The last layer computes only loss tokens after its mixing of tokens, as the logits do. It is the one of
        # multi-token prediction if that is trained.
        after = sum(layer.after for layer in layers[:-1])
        logits = 2 * self.hidden_size * self.vocab_size
        return {
            "per_token": sum(layer.before for layer in layers) + after,
            "per_loss_token": layers[-1].after + logits * (1 if self.mtp is None else 2),
            "per_token_squared": sum(layer.squared for layer in layers),
        }

    def rules(self, hf: str) -> Iterator[Rule]:
        """Yield the table of weights in Hugging Face's order; `hf` is the prefix of its names: "model."."""
        yield Rule("language.embedding.weight", (f"{hf}embed_tokens.weight",))
        for number, layer in enumerate(self.layers):
            yield from layer.rules(f"{LAYERS}{number}.", f"{hf}layers.{number}.")
        yield Rule("language.decoder.final_layernorm.weight", (f"{hf}norm.weight",))
        if not self.tie_word_embeddings:
            yield Rule("language.output_layer.weight", ("lm_head.weight",))
        if self.mtp is not None:
            yield from self.mtp.rules()


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """A vision encoder whose layers have biases and LayerNorms, with a merger of patches into image tokens."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int  # width of an image token
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_positions: int  # number of rows of the table of learned positions, a square number
    # indices of layers whose merged output is added after the language model's first layers; may be empty
    deepstack_layers: tuple[int, ...]
    rope_theta: float
    activation: str

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def position_side(self) -> int:
        """Side length of the square of learned positions."""
        return int(self.num_positions**0.5)

    def divided_widths(self) -> dict[str, int]:
        """Return the widths that tensor-parallel ranks divide with vision_split=tensor_parallel."""
        # The merger's width is a multiple of the number of heads, so it needs no entry.
        return {"vision_num_heads": self.num_heads, "vision_intermediate_size": self.intermediate_size}

    @property
    def parameters(self) -> dict[str, int]:
        """Numbers of parameters of the encoder and of its mergers."""
        # Every linear layer has a bias, hence the + 1; a LayerNorm has a weight and a bias.
        width, inner = self.hidden_size, self.intermediate_size
        patch = 3 * self.temporal_patch_size * self.patch_size**2
        attention = (3 * width + 3) * width + (width + 1) * width
        layer = 2 * 2 * width + attention + (width + 1) * inner + (inner + 1) * width
        encoder = patch * width + width + self.num_positions * width + self.num_layers * layer
        merged = width * self.spatial_merge_size**2
        merger = (merged + 1) * merged + (merged + 1) * self.out_hidden_size
        # Only the norms differ: the last merger normalises each patch, those of deepstack the merged patches.
        mergers = merger + 2 * width + len(self.deepstack_layers) * (merger + 2 * merged)
        return {"vision": encoder, "merger": mergers}

    @property
    def forward_flops(self) -> dict[str, int]:
        """FLOPs per unit of each kind of work, by the names of `trainer.data.balance.CostModel`."""
        # One frame alone: the two frames of a still image are equal, and their weights are added first. The second
        # frame of a temporal group is not counted, see trainer/data/flops.py.
        embedding = 2 * 3 * self.patch_size**2 * self.hidden_size
        layer = 2 * self.hidden_size * (4 * self.hidden_size + 2 * self.intermediate_size)
        # A merger runs once per block of patches: (merged, merged), then (merged, out). Divided by the block's patches.
        merger = 2 * self.hidden_size * (self.hidden_size * self.spatial_merge_size**2 + self.out_hidden_size)
        return {
            "per_patch": embedding + self.num_layers * layer + (1 + len(self.deepstack_layers)) * merger,
            "per_patch_squared": self.num_layers * 4 * self.hidden_size,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTokens:
    """The ids that mark the images and videos of a prompt."""

    image_token_id: int
    video_token_id: int | None  # None: the model takes no videos
    vision_start_token_id: int
    vision_end_token_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A whole model."""

    language: DecoderShape
    # both None for a text-only model
    vision: VisionShape | None = None
    images: ImageTokens | None = None
    # the multi-token prediction that can be trained; None: the model has none. See `for_training`.
    mtp: MultiTokenPrediction | None = None

    def for_training(self, train: TrainConfig) -> "ModelShape":
        """Return the shape of what a training computes: with multi-token prediction only if the settings train it."""
        if not train.mtp_loss_scaling_factor:
            return self
        return dataclasses.replace(self, language=dataclasses.replace(self.language, mtp=self.mtp))

    @property
    def num_deepstack(self) -> int:
        """Number of language layers, counted from the first, after which a feature of the vision encoder is added."""
        return 0 if self.vision is None else len(self.vision.deepstack_layers)

    @property
    def feature_width(self) -> int:
        """Width of the vision encoder's output per image token: the token, then its feature of each deepstack level."""
        return (1 + self.num_deepstack) * self.language.hidden_size

    @property
    def active_parameters(self) -> int:
        """Number of parameters that compute a token, those of the vision encoder included."""
        mtp = self.language.mtp
        layers = (*self.language.layers, *([] if mtp is None else [mtp.layer]))
        return sum(self.parameters.values()) - sum(layer.feed_forward.inactive_parameters for layer in layers)

    @property
    def parameters(self) -> dict[str, int]:
        vision = {} if self.vision is None else self.vision.parameters
        return {**vision, "language": self.language.parameters}

    @property
    def forward_flops(self) -> dict[str, int]:
        vision = {"per_patch": 0, "per_patch_squared": 0} if self.vision is None else self.vision.forward_flops
        return self.language.forward_flops | vision
