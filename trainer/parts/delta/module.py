"""The gated delta net that replaces a layer's attention: projections and parameters, divided over ranks by heads.

A PackedLayer calls `prepare` (the input projection), `attend` (convolution, gates, delta rule and gated norm, see
rule/gated_delta_net.py), and `linear_proj`, the output projection.

T = tokens of the bin on this rank, s = T / tp with sequence parallel, else T; H = value heads of this tensor-parallel
rank, d = head dim, D = hidden size. A row of the input projection is [q | k | v | z | b | a].
"""

from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint

from trainer.layers.gather import to_heads, to_sequence
from trainer.layers.recompute import recomputed
from trainer.layers.segments import PackedSegments, Rotation, joined
from trainer.layers.sharded_parameters import in_runs, mark_sharded
from trainer.parts.delta.part import DeltaNet
from trainer.parts.delta.rule.gated_delta_net import (
    DeltaHeads,
    DeltaParameters,
    check_kernels,
    gated_delta_net,
    kernels_fit,
)

# Each rank has the parameters of its own channels and heads; the norm's weight is whole on every rank.
_DIVIDED = ("conv_weight", "decay.a_log", "decay.dt_bias")


def spec(part: DeltaNet, modules: BackendSpecProvider) -> ModuleSpec:
    """Return the spec of a decoder layer's gated delta net."""
    projections = DeltaSubmodules(modules.column_parallel_linear(), modules.row_parallel_linear())
    return ModuleSpec(module=DeltaAttention, params={"heads": _heads(part)}, submodules=projections)


def check_device(part: DeltaNet, dtype: torch.dtype, device: torch.device) -> None:
    """Raise RuntimeError if the delta rule's kernels would be used and the compiler gets them wrong."""
    if kernels_fit(torch.empty(0, dtype=dtype, device=device), _heads(part)):
        check_kernels(device.index)


@dataclass(frozen=True, slots=True)
class DeltaSubmodules:
    """The modules of the two projections."""

    in_proj: type
    linear_proj: type


class DeltaAttention(MegatronModule):
    """A gated delta net in the pieces of a PackedLayer. Tensor-parallel ranks divide the `heads` of the whole model."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        heads: DeltaHeads,
        pg_collection: ProcessGroupCollection,
        **_: object,
    ) -> None:
        super().__init__(config)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        ranks = self.tp_group.size()
        self.heads = heads_of_rank(heads, ranks)  # tensor-parallel; context-parallel ranks divide these once more
        inner = heads.value * heads.dim
        shared = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            ranks * sum(rows_of(self.heads)),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",  # a name that Transformer Engine knows; the projection has more than q, k and v
            **shared,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            inner,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **shared,
        )
        # HF's axes, of a Conv1d: each channel has its own taps.
        self.conv_weight = _weight((sum(self.heads.widths), 1, DeltaNet.taps), config.params_dtype)
        self.decay = Decay(config, self.heads.value)
        self.norm_weight = _weight((heads.dim,), config.params_dtype)
        for name in _DIVIDED if ranks > 1 else ():
            mark_sharded(self.get_parameter(name), 0)

    def prepare(self, hidden_states: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, ...]:
        """Map (s, 1, D) to (T, [q | k | v]), z (T, H * d), b and a (T, H). Nothing is rotated, because the state
        already depends on the order of the tokens."""
        projected, _ = self.in_proj(hidden_states)
        return _split(projected.squeeze(1), self.heads)

    def attend(self, mixed, z, b, a, segments: PackedSegments) -> torch.Tensor:
        """Compute the delta net, given the results of `prepare` and the segments; return (T, 1, H * d)."""
        inputs, heads, group, parameters = (mixed, z, b, a), self.heads, self.cp_group, self._of_heads(0, 1)
        ranks = group.size()
        if ranks > 1:
            # A state needs its tokens in order: ranks exchange their slices of the sequence for slices of the heads,
            # and back. What a rank gets lies together: q, k, v, z, b and a of its heads, (T, ranks, rows of a rank).
            by_rank = [x.unflatten(1, (ranks, -1)) for x in (*mixed.split(heads.widths, 1), z, b, a)]
            heads, parameters = heads_of_rank(heads, ranks), self._of_heads(group.rank(), ranks)
            inputs = _split(to_heads(torch.cat(by_rank, 2), segments.cp_order, group), heads)
        is_recomputed = self.config.recompute_granularity == "selective"
        # What is computed again in backward, or for other ranks, takes new memory.
        buffers = None if is_recomputed or ranks > 1 else segments.buffers
        compute = partial(recomputed, gated_delta_net) if is_recomputed else gated_delta_net
        out = compute(*inputs, parameters, heads, segments.chunks, buffers)
        if ranks > 1:
            out = to_sequence(out, segments.cp_order, group).flatten(1)
        return out[:, None]

    def modules_of_prepare(self) -> list[torch.nn.Module]:
        return [self.in_proj]

    @property
    def attended_width(self) -> int:
        return self.heads.value * self.heads.dim

    def partial_gradients(self) -> list[torch.nn.Parameter]:
        """Return the norm's weight: every tensor-parallel rank holds it whole and uses it for its own heads."""
        return [self.norm_weight] if self.tp_group.size() > 1 and self.norm_weight.requires_grad else []

    def _of_heads(self, rank: int, ranks: int) -> DeltaParameters:
        """Return the parameters of the heads of one context-parallel rank."""
        # A rank's channels are a slice of q's, one of k's and one of v's.
        runs = self.conv_weight.squeeze(1).split(self.heads.widths)
        return DeltaParameters(
            torch.cat([run.chunk(ranks)[rank] for run in runs]),
            *self.decay(rank, ranks),
            self.norm_weight,
            self.config.layernorm_epsilon,
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Extend megatron-core's method by the parameters that tensor-parallel ranks divide."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state |= make_sharded_tensors_for_checkpoint(
            {name: self.get_parameter(name) for name in _DIVIDED},
            prefix,
            dict.fromkeys(_DIVIDED, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        # Checkpoints name the decay's parameters without their module, `decay.`, which is there for FSDP2 alone.
        apply_prefix_mapping(state, {prefix + "decay.": prefix})
        if self.tp_group.size() > 1:
            # A rank has a part of each run of rows (q, k, v, ...), which a plain sharded tensor would store as one run.
            for name, rows in (("in_proj.weight", rows_of(self.heads)), ("conv_weight", self.heads.widths)):
                state[prefix + name] = in_runs(state[prefix + name], rows, self.tp_group.rank(), self.tp_group.size())
        return state


class Decay(MegatronModule):
    """The decay parameters of each head, which are always float32, whatever the dtype of the other weights: in bfloat16
    their updates would be lost to rounding."""

    # FSDP2 casts the weights of a module when its forward pass begins, so these parameters are a module of their own.
    computes_in_float32 = True  # trainer/parallel/fsdp.py reads it

    def __init__(self, config: TransformerConfig, heads: int) -> None:
        super().__init__(config)
        self.a_log, self.dt_bias = (_weight((heads,), torch.float32) for _ in range(2))

    def forward(self, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A_log and dt_bias of the heads of one context-parallel rank, (H / ranks,) float32."""
        return self.a_log.chunk(ranks)[rank], self.dt_bias.chunk(ranks)[rank]


class SplitRows(torch.autograd.Function):
    """Split (T, rows) into slices (T, ...). Gradients that are such slices of one tensor are joined without a copy."""

    @staticmethod
    def forward(ctx, projected, widths: tuple[int, ...]):
        ctx.widths = widths
        return projected.split(widths, dim=1)

    @staticmethod
    def backward(ctx, *grads):
        whole = joined(grads)
        return (torch.cat(grads, dim=1) if whole is None else whole), None


def _split(projected: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, ...]:
    """Split (T, rows) into [q | k | v], z, b and a, each (T, ...)."""
    rows = rows_of(heads)
    return SplitRows.apply(projected, (sum(rows[:3]), *rows[3:]))


def rows_of(heads: DeltaHeads) -> tuple[int, ...]:
    """Return the number of rows of q, k, v, z, b and a in the input projection."""
    return (*heads.widths, heads.widths[-1], heads.value, heads.value)


def heads_of_rank(heads: DeltaHeads, ranks: int) -> DeltaHeads:
    return DeltaHeads(heads.key // ranks, heads.value // ranks, heads.dim)


def _heads(part: DeltaNet) -> DeltaHeads:
    return DeltaHeads(part.key_heads, part.value_heads, part.head_dim)


def _weight(shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype))
