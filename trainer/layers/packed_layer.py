"""A transformer layer over a packed bin, in two halves around its attention.

T = tokens (or patches) of the bin on this rank, s = T / tp with sequence parallel, else T; h = query heads of this
rank, g = its key-value heads, d = head dim, D = hidden size.
"""

import dataclasses

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from trainer.layers.recompute import not_kept
from trainer.layers.segments import PackedSegments, Rotation, RoutedTokens, SelectedRows


class PackedLayer(TransformerLayer):
    """megatron-core's layer with norms before attention and MLP.

    It has no features that packed training never uses (caches, cross attention, dropout). The two halves around the
    attention depend only on the number of tokens, the attention itself on the bin's samples.

    The module of a mixer has `prepare`, `attend`, `linear_proj`, `modules_of_prepare`, `attended_width` and
    `partial_gradients`. The module of a feed-forward part maps (s, 1, D) to its output, and a bias or None. If the part
    routes tokens, the module also takes the selected rows and the tokens of the bin, and returns only its output.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *args: object,
        pg_collection: ProcessGroupCollection,
        **kwargs: object,
    ) -> None:
        # megatron-core gives its groups only to the feed-forward modules that it knows.
        without = dataclasses.replace(submodules, mlp=IdentityOp)
        super().__init__(config, without, *args, pg_collection=pg_collection, **kwargs)
        self.mlp = build_module(submodules.mlp, config=self.config, pg_collection=pg_collection)
        self.routes_tokens = hasattr(self.mlp, "prepare_training")

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, segments: PackedSegments, rows: SelectedRows | None = None
    ) -> torch.Tensor:
        """Map (s, 1, D) to (s, 1, D), or only to the selected rows."""
        hidden, *qkv = self.before_attention(hidden, rotation)
        hidden, delta = self.after_attention(hidden, self.attend(*qkv, segments), rows, segments.routed)
        return hidden + delta

    def before_attention(
        self, hidden: torch.Tensor, rotation: Rotation, delta: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the layer's input (s, 1, D), its queries (T, h, d), and its keys and values (T, g, d).

        `after_attention` must get the returned input and not `hidden`: the kernel that computes the norm's gradient
        adds the gradient of the returned input.

        Args:
            hidden: the layer's input, or a part of it.
            delta: (s, 1, D), the rest of the input, which is added to `hidden`; None: `hidden` is the input.
        """
        hidden, normed = self.input_layernorm.sum_and_norm(hidden, delta)
        with not_kept(normed, self.input_layernorm, hidden):
            return hidden, *self.self_attention.prepare(normed, rotation)

    def attend(self, *qkv_and_segments: object) -> torch.Tensor:
        """Attend, given queries, keys and values of `before_attention` and the segments; return (T, 1, h * d)."""
        return self.self_attention.attend(*qkv_and_segments)

    @property
    def attended_width(self) -> int:
        """h * d, the width of `attend`'s output."""
        return self.self_attention.attended_width

    def modules_before_attention(self) -> list[torch.nn.Module]:
        """Return the modules whose parameters `before_attention` uses."""
        return [self.input_layernorm, *self.self_attention.modules_of_prepare()]

    def modules_after_attention(self) -> list[torch.nn.Module]:
        """Return the modules whose parameters `after_attention` uses."""
        return [self.self_attention.linear_proj, self.pre_mlp_layernorm, self.mlp]

    def after_attention(
        self,
        hidden: torch.Tensor,
        attended: torch.Tensor,
        rows: SelectedRows | None = None,
        routed: RoutedTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Map the layer's input (s, 1, D) and attention's output (T, 1, h * d) to two tensors (s, 1, D), or of the
        selected rows, whose sum is the layer's output."""
        # Loads and auxiliary loss cover all tokens, so the norm is computed for all rows, whatever rows are selected.
        if routed is not None and self.routes_tokens:
            delta = _with_bias(*self.self_attention.linear_proj(attended))
            hidden, normed = self.pre_mlp_layernorm.sum_and_norm(hidden, delta)
            with not_kept(normed, self.pre_mlp_layernorm, hidden):
                return (hidden if rows is None else rows.of_hidden(hidden)), self.mlp(normed, rows, routed)
        if rows is not None:
            hidden, attended = rows.of_hidden(hidden), rows.of_attended(attended)
        delta = _with_bias(*self.self_attention.linear_proj(attended))
        hidden, normed = self.pre_mlp_layernorm.sum_and_norm(hidden, delta)
        with not_kept(normed, self.pre_mlp_layernorm, hidden):
            return hidden, _with_bias(*self.mlp(normed))


def _with_bias(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias
