"""The language model of Qwen3-VL: a decoder whose first layers each receive a level of vision features.

T = tokens of the bin, V = image tokens, N = loss tokens, D = hidden size, L = deepstack levels.
"""

import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor

from trainer.models.attention import PackedSegments, Rotation
from trainer.models.module_set import layer_spec
from trainer.models.qwen3_vl.config import LanguageSizes


class DeepstackBlock(TransformerBlock):
    """A transformer block that adds level i of the deepstack features to the image tokens after layer i."""

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        rotation: Rotation,
        segments: PackedSegments,
        features: list[torch.Tensor],
        image_index: torch.Tensor,
    ) -> torch.Tensor:
        """(T, 1, D) -> (T, 1, D); features are L times (V, D), image_index (V,) says where in T they go."""
        hidden = hidden_states if self.pre_process else self.input_tensor
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        for layer in self.layers:
            hidden, _ = layer(hidden_states=hidden, rotary_pos_emb=rotation, packed_seq_params=segments)
            level = layer.layer_number - 1
            if level < len(features):
                hidden = hidden.index_add(0, image_index, features[level][:, None])
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
            hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        return hidden


class LanguageModel(MegatronModule):
    """Embedding (first pipeline rank), decoder layers, output layer and loss (last pipeline rank)."""

    def __init__(
        self,
        config: TransformerConfig,
        sizes: LanguageSizes,
        modules: BackendSpecProvider,
        groups: ProcessGroupCollection,
        *,
        pre_process: bool = True,
        post_process: bool = True,
    ) -> None:
        super().__init__(config)
        self.sizes, self.groups = sizes, groups
        self.pre_process, self.post_process = pre_process, post_process
        tied = sizes.tied_embeddings
        if pre_process or (post_process and tied):
            self.embedding = tensor_parallel.VocabParallelEmbedding(
                sizes.vocab_size,
                sizes.hidden_size,
                init_method=config.init_method,
                config=config,
                tp_group=groups.tp,
            )
        layers = [layer_spec(modules, causal=True, qk_norm=True)] * get_num_layers_to_build(config)
        self.decoder = DeepstackBlock(
            config,
            TransformerBlockSubmodules(layer_specs=layers, layer_norm=modules.layer_norm()),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=groups,
        )
        if post_process:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                sizes.hidden_size,
                sizes.vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=tied,
                tp_group=groups.tp,
            )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(1, T) -> (T, 1, D)."""
        return self.embedding(input_ids).transpose(0, 1).contiguous()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n, 1, D) -> (n, 1, vocabulary / tp)."""
        weight = self.embedding.weight if self.sizes.tied_embeddings else None
        return self.output_layer(hidden, weight=weight)[0]

    def losses(self, hidden: torch.Tensor, loss_index: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(T, 1, D) -> (N,) float32 cross entropy at the positions that carry loss, and nowhere else."""
        logits = self.logits(hidden.index_select(0, loss_index))
        return tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels[:, None])[:, 0]
