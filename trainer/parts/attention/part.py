"""Grouped-query attention, described without torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel
from trainer.model.layer import LayerFlops, Mixer
from trainer.model.rules import GatedGroupedQKV, GroupedQKV, Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention(Mixer):
    """Attention with norms of queries and keys."""

    spec = "trainer.parts.attention.module:spec"
    role = "attention"

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # whether the output of each query head is multiplied by the sigmoid of a gate, which is projected with the queries
    gated: bool = False

    @property
    def parameters(self) -> int:
        return self._projections + self._output_projection + 2 * self.head_dim  # two norms, which all heads share

    @property
    def flops(self) -> LayerFlops:
        """Forward FLOPs; `squared` is 2 products of 2 FLOPs, halved because only the causal half is computed."""
        return LayerFlops(2 * self._projections, 2 * self._output_projection, 2 * self.num_heads * self.head_dim)

    def saved_activations(self, *, selective: bool) -> int:
        """Return the numbers of queries, keys and values, before their norm and rotated, and of the output."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        # A gate adds the size of the gate and of the output that it multiplies.
        return 2 * (queries + 2 * keys) + queries + (2 * queries if self.gated else 0)

    def divided_widths(self) -> dict[str, int]:
        # megatron-core could also share key-value heads among more ranks, which no test of ours has shown to be right.
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}

    def transformer_settings(self) -> Mapping[str, Any]:
        return {
            "num_attention_heads": self.num_heads,
            "num_query_groups": self.num_kv_heads,
            "kv_channels": self.head_dim,
            "qk_layernorm": True,
            "attention_output_gate": self.gated,
        }

    def rules(self, ours: str, hf: str) -> Iterator[Rule]:
        ours, hf = f"{ours}self_attention.", f"{hf}self_attn."
        # Rows of the queries of one key-value head, and of all query heads and key heads.
        group, dim = self.num_heads // self.num_kv_heads * self.head_dim, self.head_dim
        heads, keys = self.num_heads * dim, self.num_kv_heads * dim
        packing, queries = GroupedQKV(groups=self.num_kv_heads, widths=(group, dim, dim)), heads
        if self.gated:
            packing = GatedGroupedQKV(groups=self.num_kv_heads, widths=(2 * group, dim, dim), head_dim=dim)
            queries = 2 * heads
        yield Rule(
            ours + "linear_qkv.weight",
            tuple(f"{hf}{name}_proj.weight" for name in "qkv"),
            packing,
            sizes=tuple((rows, self.hidden_size) for rows in (queries, keys, keys)),
            role=self.role,
        )
        yield Rule(ours + "q_layernorm.weight", (hf + "q_norm.weight",))
        yield Rule(ours + "k_layernorm.weight", (hf + "k_norm.weight",))
        output = ((self.hidden_size, heads),)
        yield Rule(ours + "linear_proj.weight", (hf + "o_proj.weight",), sizes=output, role=self.role, axis=1)

    @property
    def _projections(self) -> int:
        per_query = 2 if self.gated else 1
        return self.hidden_size * (per_query * self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def _output_projection(self) -> int:
        return self.hidden_size * self.num_heads * self.head_dim


# The sizes in a model with random weights.


class WithPartialRotation(StrictModel):
    """The field of a family that rotates a part of each head. The class that it extends has the field `head_dim`."""

    later_fields = ("rotary_fraction",)

    rotary_fraction: float = Field(default=1.0, gt=0, le=1, description="share of a language head that is rotated")

    @model_validator(mode="after")
    def _pairs_are_whole(self) -> "WithPartialRotation":
        if (rotated := self.head_dim * self.rotary_fraction) % 2 or not rotated:
            raise ValueError(f"head_dim={self.head_dim} x rotary_fraction={self.rotary_fraction} is no even number")
        return self
