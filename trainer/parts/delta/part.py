"""The gated delta net of Qwen3.5, described without torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel
from trainer.model.layer import LayerFlops, Mixer
from trainer.model.rules import Rule, StackedRuns
from trainer.model.shape import DELTA_CHUNK


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaNet(Mixer):
    """A gated delta net."""

    spec = "trainer.parts.delta.module:spec"
    role = "delta"
    in_chunks = True
    check_device = "trainer.parts.delta.module:check_device"
    taps = 4  # width of the convolution, in tokens: the families refuse another, for which the kernels are not written

    hidden_size: int
    # numbers of heads; each key head serves the same number of value heads
    key_heads: int
    value_heads: int
    head_dim: int  # width of a head's query, key and value

    @property
    def channels(self) -> tuple[int, int, int]:
        """Total widths of a token's queries, keys and values."""
        key, value = self.key_heads * self.head_dim, self.value_heads * self.head_dim
        return key, key, value

    @property
    def parameters(self) -> int:
        # Convolution, A_log and dt_bias, and the norm that all heads share.
        own = self.taps * sum(self.channels) + 2 * self.value_heads + self.head_dim
        return self._projections + self._output_projection + own

    @property
    def flops(self) -> LayerFlops:
        """Forward FLOPs. The delta rule counts as `before`, because a state needs every token; nothing grows with the
        length of a sample."""
        width = self.head_dim
        # Per token and value head: three products inside a chunk of C tokens (6 C d), the solution of a triangular
        # system (2 C d), and three products with the state (6 d^2).
        rule = self.value_heads * (8 * DELTA_CHUNK * width + 6 * width**2)
        convolution = 2 * self.taps * sum(self.channels)
        return LayerFlops(2 * self._projections + convolution + rule, 2 * self._output_projection, 0)

    def saved_activations(self, *, selective: bool) -> int:
        """Return the number of values per token that the kernels save."""
        queries, keys, values = self.channels
        # Not kept with selective recomputation: q, k and v after the convolution, the rule's output, and decay and
        # beta, which are float32 and count twice.
        inside = queries + keys + values + values + 4 * self.value_heads
        # Always kept: the projected [q | k | v | z | b | a] and the input of the output projection.
        return queries + keys + 3 * values + 2 * self.value_heads + (0 if selective else inside)

    def divided_widths(self) -> dict[str, int]:
        return self.context_divided_widths()  # also the number of key heads

    def context_divided_widths(self) -> dict[str, int]:
        return {"linear_num_key_heads": self.key_heads}

    def rules(self, ours: str, hf: str) -> Iterator[Rule]:
        ours, hf = f"{ours}self_attention.", f"{hf}linear_attn."
        channels, heads, width = self.channels, self.value_heads, self.hidden_size
        joined = StackedRuns(rows=(channels, channels[-1:], (heads,), (heads,)))
        names = tuple(f"{hf}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
        sizes = tuple((out, width) for out in (sum(channels), channels[-1], heads, heads))
        yield Rule(ours + "in_proj.weight", names, joined, sizes=sizes, role=self.role)
        yield Rule(ours + "conv_weight", (hf + "conv1d.weight",), StackedRuns(rows=(channels,)))
        yield Rule(ours + "decay.a_log", (hf + "A_log",))
        yield Rule(ours + "decay.dt_bias", (hf + "dt_bias",))
        yield Rule(ours + "norm_weight", (hf + "norm.weight",))
        output = ((width, channels[-1]),)
        yield Rule(ours + "linear_proj.weight", (hf + "out_proj.weight",), sizes=output, role=self.role, axis=1)

    @property
    def _projections(self) -> int:
        return self.hidden_size * (sum(self.channels) + self.channels[-1] + 2 * self.value_heads)

    @property
    def _output_projection(self) -> int:
        return self.hidden_size * self.channels[-1]


# The sizes in a model with random weights.


class DeltaSizes(StrictModel):
    """The gated delta nets of a hybrid decoder."""

    key_heads: int = Field(gt=0, le=1024, description="key heads of a gated delta net")
    value_heads: int = Field(gt=0, le=1024, description="value heads, a multiple of key_heads")
    head_dim: int = Field(ge=8, le=1024, multiple_of=8, description="width of a key and of a value head")
    attention_interval: int = Field(
        gt=0, le=1024, description="interval of attention layers: 4 means every fourth layer"
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> "DeltaSizes":
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}")
        return self


class WithDelta(StrictModel):
    """The field of a family whose decoder has gated delta nets."""

    later_fields = ("delta",)

    delta: DeltaSizes | None = Field(default=None, description="gated delta nets; null: there are none")
