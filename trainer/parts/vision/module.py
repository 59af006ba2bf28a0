"""The vision encoder of Qwen3-VL: from the patches of a bin's images to image tokens and deepstack features.

A temporal group of a video is an image of two frames: only `PatchEmbedding` sees the second one.

`VisionEncoder.forward` tells the steps. The layers are PackedLayers with biases, LayerNorms and full attention inside
each image; spans.py computes all that lies between two attentions as one function where it can.

P = patches, V = image tokens = P / merge^2, C = bytes of a patch (3 * patch_size^2), D = language hidden size,
L = deepstack levels.
"""

from collections.abc import Iterator
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.parallel import ParallelConfig
from trainer.data.micro_batch import MicroBatch
from trainer.layers.module_set import ACTIVATIONS, layer_around, shared_config
from trainer.layers.recompute import recomputed
from trainer.layers.segments import PackedSegments, Rotation, inverse_frequencies
from trainer.model.shape import VisionShape
from trainer.parts.attention.module import attention_spec
from trainer.parts.mlp.module import mlp_spec
from trainer.parts.vision.spans import can_join, joined_layer, joined_layers


def vision_config(shape: VisionShape, parallel: ParallelConfig, dtype: torch.dtype) -> TransformerConfig:
    """Return megatron-core's config of the vision encoder."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        kv_channels=shape.head_dim,
        normalization="LayerNorm",
        layernorm_epsilon=1e-6,
        activation_func=ACTIVATIONS[shape.activation],
        add_bias_linear=True,
        # All layers are on the first pipeline rank, and the sequence is never cut.
        tensor_model_parallel_size=parallel.tp if parallel.vision_split == "tensor_parallel" else 1,
        **shared_config(dtype),
    )


class VisionEncoder(MegatronModule):
    """The vision encoder: patches -> transformer with full attention inside each image -> merged image tokens.

    It encodes only the images of its rank; the model gathers the image tokens of all ranks.

    Args:
        recompute: whether layers keep only their inputs for the backward pass.
        sharded: whether a layer's weights are gathered when the layer is called (FSDP2).
    """

    is_random = False  # whether a layer draws random numbers: adapters with dropout

    def __init__(
        self,
        config: TransformerConfig,
        shape: VisionShape,
        modules: BackendSpecProvider,
        groups: ProcessGroupCollection,
        *,
        recompute: bool = False,
        sharded: bool = False,
    ) -> None:
        super().__init__(config)
        self.shape, self.recompute, self.sharded = shape, recompute, sharded
        self.patch_embed = PatchEmbedding(config, shape)
        self.pos_embed = torch.nn.Parameter(
            torch.empty(shape.num_positions, shape.hidden_size, dtype=config.params_dtype)
        )
        attention = attention_spec(modules, head_dim=shape.head_dim, causal=False, qk_norm=False)
        spec = layer_around(attention, mlp_spec(modules), modules)
        self.blocks = TransformerBlock(
            config,
            TransformerBlockSubmodules(layer_specs=[spec] * shape.num_layers),
            post_layer_norm=False,  # the mergers have norms of their own
            pg_collection=groups,
        )
        self.merger = PatchMerger(config, shape, modules, groups, norm_after=False)
        self.deepstack_mergers = torch.nn.ModuleList(
            PatchMerger(config, shape, modules, groups, norm_after=True) for _ in shape.deepstack_layers
        )

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return (V, (1 + L) * D): each image token, followed by its feature of every deepstack level."""
        # If nothing before the mergers is trained, only they need a graph.
        before = (self.pos_embed, *self.patch_embed.parameters(), *self.blocks.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(param.requires_grad for param in before)):
            tapped = self._hidden_states(batch)
        # The features are in the order of their layers, whatever the order of the config's list.
        by_layer = [self.deepstack_mergers[i] for i in np.argsort(self.shape.deepstack_layers)]
        levels = [merger(hidden) for merger, hidden in zip([*by_layer, self.merger], tapped)]
        return torch.cat([levels[-1], *levels[:-1]], dim=-1)

    def _hidden_states(self, batch: MicroBatch) -> list[torch.Tensor]:
        """Return (P, 1, hidden) after each deepstack layer and after the last layer.

        Its other tensors are freed before the mergers run.
        """
        # The table of learned positions is a square, resampled to the rows and columns of each image.
        taps, weights = position_taps(batch.patch_coordinates, batch.patch_frames, self.shape.position_side)
        weights = weights.to(self.pos_embed.dtype)
        positions = F.embedding_bag(taps, self.pos_embed, per_sample_weights=weights, mode="sum")
        patches = self.patch_embed(batch.patches, batch.later_patches, batch.later_rows)
        embedded = (patches + positions)[:, None]
        rotation = Rotation.of(vision_angles(batch.patch_coordinates, self.shape))
        segments = PackedSegments.of(batch.vision_cu_seqlens, batch.vision_max_seqlen)
        tapped = []
        for number, hidden in enumerate(self._layer_outputs(embedded, rotation, segments)):
            if number in self.shape.deepstack_layers:
                tapped.append(hidden)
        return [*tapped, hidden]

    @cached_property
    def _is_joined(self) -> bool:
        # Decided at the first call: if the linear layers have adapters by then, the layers cannot be joined.
        return not self.sharded and can_join(self.blocks.layers)

    def _layer_outputs(
        self, hidden: torch.Tensor, rotation: Rotation, segments: PackedSegments
    ) -> Iterator[torch.Tensor]:
        """Yield the output of each layer, (P, 1, hidden)."""
        layers = self.blocks.layers
        if self._is_joined and not self.recompute:
            yield from joined_layers(layers, hidden, rotation, segments)
            return
        for layer in layers:
            # To recompute layer by layer, each layer is joined alone: no span reaches into the next one.
            call = partial(joined_layer, layer) if self._is_joined else layer
            call = partial(recomputed, call, is_random=self.is_random) if self.recompute else call
            hidden = call(hidden, rotation, segments)
            yield hidden

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Extend megatron-core's method by the deepstack mergers' own."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        # megatron-core takes the modules of a ModuleList to be whole on every rank, which those are not with
        # vision_split=tensor_parallel.
        for number, merger in enumerate(self.deepstack_mergers):
            state |= merger.sharded_state_dict(f"{prefix}deepstack_mergers.{number}.", sharded_offsets, metadata)
        return state


class PatchEmbedding(torch.nn.Module):
    """A module that normalises uint8 patches and projects them. The weight has a frame axis."""

    def __init__(self, config: TransformerConfig, shape: VisionShape) -> None:
        super().__init__()
        axes = (shape.hidden_size, 3, shape.temporal_patch_size, shape.patch_size, shape.patch_size)
        self.weight = torch.nn.Parameter(torch.empty(axes, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.empty(shape.hidden_size, dtype=config.params_dtype))
        # Not persistent: `set_normalisation` sets them from the data's own pixel format.
        self.register_buffer("offset", torch.zeros(3), persistent=False)
        self.register_buffer("divisor", torch.ones(3), persistent=False)

    def set_normalisation(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Set the image processor's mean and standard deviation per channel, on the scale 0 to 1."""
        self.offset.copy_(torch.tensor(mean) * 255)
        self.divisor.copy_(torch.tensor(std) * 255)

    def forward(self, patches: torch.Tensor, later: torch.Tensor, later_rows: torch.Tensor) -> torch.Tensor:
        """Embed patches to (P, hidden).

        Args:
            patches: (P, C) uint8 of images and of the first frames of temporal groups.
            later: (Q, C) uint8 of the second frames.
            later_rows: (Q,) int64 rows of `patches` with the same places in the first frames.
        """
        pixels = self._pixels(patches)
        # The frames of a still image are equal, so one product with their summed weights suffices.
        embedded = F.linear(pixels.flatten(1), self.weight.sum(dim=2).flatten(1), self.bias)
        if len(later) == 0:
            return embedded
        # A group needs both frames' weights. Its product above is not used: to choose the others' rows costs more.
        both = torch.stack((pixels[later_rows], self._pixels(later)), dim=2)  # in the weight's order
        return embedded.index_copy(0, later_rows, F.linear(both.flatten(1), self.weight.flatten(1), self.bias))

    def _pixels(self, patches: torch.Tensor) -> torch.Tensor:
        """Return (n, 3, patch_size^2) normalised pixels of (n, C) uint8."""
        pixels = patches.view(len(patches), 3, -1).float()  # normalised in float32, whatever the weights' dtype
        return pixels.sub(self.offset[:, None]).div(self.divisor[:, None]).to(self.weight.dtype)


class PatchMerger(MegatronModule):
    """A module that merges merge x merge patches into one image token. Deepstack's mergers normalise after the patches
    are joined."""

    def __init__(self, config, shape: VisionShape, modules: BackendSpecProvider, groups, *, norm_after: bool) -> None:
        super().__init__(config)
        self.width = shape.hidden_size * shape.spatial_merge_size**2
        self.norm_after = norm_after
        norm_size = self.width if norm_after else shape.hidden_size
        self.norm = build_module(modules.layer_norm(), config=config, hidden_size=norm_size, eps=1e-6)
        shared = {
            "config": config,
            "init_method": config.init_method,
            "bias": True,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": groups.tp,
        }
        column, row = modules.column_parallel_linear(), modules.row_parallel_linear()
        self.linear_fc1 = column(self.width, self.width, gather_output=False, **shared)
        self.linear_fc2 = row(self.width, shape.out_hidden_size, input_is_parallel=True, **shared)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Merge (P, 1, hidden) to (V, D)."""
        hidden = self.norm(hidden.reshape(-1, self.width)) if self.norm_after else self.norm(hidden)
        hidden, _ = self.linear_fc1(hidden.reshape(-1, 1, self.width))
        hidden, _ = self.linear_fc2(F.gelu(hidden))  # the exact gelu, unlike the layers' tanh approximation
        return hidden.squeeze(1)


def position_taps(coordinates: torch.Tensor, frames: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the taps that resample a side x side table of learned positions to each frame's grid.

    The interpolation is bilinear with aligned corners, as in transformers'
    `get_vision_interpolation_indices_and_weights`.

    Args:
        coordinates: (P, 2) int32 row and column of each patch.
        frames: (P, 2) int32 numbers of rows and columns of each patch's frame.

    Returns:
        (P, 4) int64 rows of the table for each patch, and their (P, 4) float32 weights, which sum to 1.
    """
    # Every operation on floats is a single float32 operation, so all devices give the same bits; none is waited for.
    source = coordinates.float() * (side - 1) / (frames - 1).clamp(min=1)
    low = source.floor()
    fraction = source - low
    index = low.long()
    near = torch.stack((index, (index + 1).clamp(max=side - 1)), -1)  # (P, axis, 2)
    weights = torch.stack((1 - fraction, fraction), -1)
    taps = near[:, 0, :, None] * side + near[:, 1, None]
    return taps.flatten(1), (weights[:, 0, :, None] * weights[:, 1, None]).flatten(1)


def vision_angles(patch_coordinates: torch.Tensor, shape: VisionShape) -> torch.Tensor:
    """Return the angles of (P, 2) rows and columns: (P, head_dim / 2) float32. Half of the pairs rotate by the row,
    half by the column."""
    inverse = inverse_frequencies(shape.rope_theta, shape.head_dim // 2, patch_coordinates.device)
    return (patch_coordinates[..., None].float() * inverse).flatten(1)
