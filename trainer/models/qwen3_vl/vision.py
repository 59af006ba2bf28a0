"""The vision encoder of Qwen3-VL: patches of all images of a bin -> image tokens and deepstack features.

P = patches, V = image tokens = P / merge^2, C = bytes of a patch (3 * patch_size^2), D = language hidden size,
L = deepstack levels.
"""

from functools import partial

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

from trainer.batch import MicroBatch
from trainer.models.attention import PackedSegments, Rotation, recomputed
from trainer.models.module_set import layer_spec
from trainer.models.qwen3_vl.config import VisionSizes
from trainer.models.qwen3_vl.rope import vision_angles


class PatchEmbedding(torch.nn.Module):
    """Normalises uint8 patches and projects them. The weight has a frame axis; a still image is its own copy there."""

    def __init__(self, config: TransformerConfig, sizes: VisionSizes) -> None:
        super().__init__()
        shape = (sizes.hidden_size, 3, sizes.temporal_patch_size, sizes.patch_size, sizes.patch_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.empty(sizes.hidden_size, dtype=config.params_dtype))
        self.register_buffer("offset", torch.zeros(3), persistent=False)
        self.register_buffer("divisor", torch.ones(3), persistent=False)

    def set_normalisation(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Per-channel mean and standard deviation of the image processor, on the scale 0 to 1."""
        self.offset.copy_(torch.tensor(mean) * 255)
        self.divisor.copy_(torch.tensor(std) * 255)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """(P, C) uint8 -> (P, hidden). Equal frames: the sum of the frames' weights does the work of both."""
        pixels = patches.view(len(patches), 3, -1).float()
        pixels = pixels.sub(self.offset[:, None]).div(self.divisor[:, None]).flatten(1)
        weight = self.weight.sum(dim=2).flatten(1)
        return F.linear(pixels.to(weight.dtype), weight, self.bias)


class PatchMerger(MegatronModule):
    """merge x merge patches -> one image token. Deepstack's mergers normalise after putting the patches together."""

    def __init__(self, config, sizes: VisionSizes, modules: BackendSpecProvider, groups, *, norm_after: bool) -> None:
        super().__init__(config)
        self.width = sizes.hidden_size * sizes.spatial_merge_size**2
        self.norm_after = norm_after
        norm_size = self.width if norm_after else sizes.hidden_size
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
        self.linear_fc2 = row(self.width, sizes.out_hidden_size, input_is_parallel=True, **shared)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(P, 1, hidden) -> (V, D)."""
        hidden = self.norm(hidden.reshape(-1, self.width)) if self.norm_after else self.norm(hidden)
        hidden, _ = self.linear_fc1(hidden.reshape(-1, 1, self.width))
        hidden, _ = self.linear_fc2(F.gelu(hidden))
        return hidden.squeeze(1)


class VisionEncoder(MegatronModule):
    """Patches -> transformer with full attention inside each image -> merged image tokens.

    It encodes the images of its rank alone; the model gathers what the ranks make of theirs.
    """

    def __init__(
        self,
        config: TransformerConfig,
        sizes: VisionSizes,
        modules: BackendSpecProvider,
        groups: ProcessGroupCollection,
        *,
        recompute: bool = False,
    ) -> None:
        super().__init__(config)
        self.sizes, self.recompute = sizes, recompute
        self.patch_embed = PatchEmbedding(config, sizes)
        self.pos_embed = torch.nn.Parameter(
            torch.empty(sizes.num_positions, sizes.hidden_size, dtype=config.params_dtype)
        )
        spec = layer_spec(modules, causal=False, qk_norm=False)
        self.blocks = TransformerBlock(
            config,
            TransformerBlockSubmodules(layer_specs=[spec] * sizes.num_layers),
            post_layer_norm=False,
            pg_collection=groups,
        )
        self.merger = PatchMerger(config, sizes, modules, groups, norm_after=False)
        self.deepstack_mergers = torch.nn.ModuleList(
            PatchMerger(config, sizes, modules, groups, norm_after=True) for _ in sizes.deepstack_layers
        )

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """(V, (1 + L) * D): each image token, and after it its feature of every deepstack level."""
        # With frozen layers the mergers alone need a graph.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._layers_learn()):
            taps = self._hidden_states(batch)
        # Features come in the order of their layers, whatever the order of the config's list.
        by_layer = [self.deepstack_mergers[i] for i in np.argsort(self.sizes.deepstack_layers)]
        levels = [merger(hidden) for merger, hidden in zip([*by_layer, self.merger], taps)]
        return torch.cat([levels[-1], *levels[:-1]], dim=-1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """megatron-core's, which takes what is in a ModuleList for whole on every tensor-parallel rank."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for number, merger in enumerate(self.deepstack_mergers):
            state |= merger.sharded_state_dict(f"{prefix}deepstack_mergers.{number}.", sharded_offsets, metadata)
        return state

    def _layers_learn(self) -> bool:
        return self.pos_embed.requires_grad

    def _hidden_states(self, batch: MicroBatch) -> list[torch.Tensor]:
        """(P, 1, hidden) after each deepstack layer and after the last."""
        places = batch.patch_positions()
        weights = places.weights.to(self.pos_embed.dtype)
        positions = F.embedding_bag(places.taps, self.pos_embed, per_sample_weights=weights, mode="sum")
        hidden = (self.patch_embed(batch.patches.values) + positions)[:, None]
        rotation = Rotation.of(vision_angles(places.coordinates, self.sizes))
        segments = PackedSegments.of(batch.vision_cu_seqlens, batch.vision_max_seqlen)
        taps = []
        for number, layer in enumerate(self.blocks.layers):
            call = partial(recomputed, layer) if self.recompute else layer
            hidden = call(hidden, rotation, segments)
            if number in self.sizes.deepstack_layers:
                taps.append(hidden)
        return [*taps, hidden]
