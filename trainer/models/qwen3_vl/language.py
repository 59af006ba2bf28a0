"""The language model of Qwen3-VL: a decoder whose first layers each receive a level of vision features.

t = tokens of this context-parallel rank, s = t / tp with sequence parallel, else t; V = image tokens among the s,
N = loss tokens among the t, D = hidden size, L = deepstack levels.
"""

import dataclasses
from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor

from trainer.models.attention import PackedSegments, Rotation, recomputed
from trainer.models.layer_graphs import LayerGraphs
from trainer.models.module_set import FLOAT8_ROWS, layer_spec
from trainer.models.output_loss import OutputLayer
from trainer.models.qwen3_vl.config import LanguageSizes
from trainer.models.rows import ChosenRows


class DeepstackBlock(TransformerBlock):
    """A transformer block that adds level i of the deepstack features to the image tokens after layer i."""

    recompute = False
    graphs: LayerGraphs | None = None

    def capture(self, num_tokens: int, num_levels: int) -> None:
        """Have training replay the layers as CUDA graphs from now on; weights and gradients stay where they are.

        Args:
            num_tokens: t, of every bin.
            num_levels: L.
        """
        self.graphs = LayerGraphs(list(self.layers), num_tokens, interrupted=frozenset(range(num_levels)))
        self.graphs.capture()

    def release(self) -> None:
        """Launch the layers' kernels one by one again."""
        if self.graphs is not None:
            self.graphs.release()
            self.graphs = None

    def forward(
        self,
        hidden_states: torch.Tensor | None,
        rotation: Rotation,
        segments: PackedSegments,
        features: tuple[torch.Tensor, ...],
        image_index: torch.Tensor,
        rows: ChosenRows | None,
    ) -> torch.Tensor:
        """(s, 1, D) -> (s, 1, D), or of the chosen rows alone, which the last layer chooses.

        Args:
            features: L times (V, D).
            image_index: (V,) where in s they go.
        """
        hidden = hidden_states if self.pre_process else self.input_tensor
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)

        def add_feature(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            level = layer.layer_number - 1
            return hidden.index_add(0, image_index, features[level][:, None]) if level < len(features) else hidden

        if self.graphs is not None and torch.is_grad_enabled():
            hidden, attended = self.graphs(hidden, rotation, segments, add_feature)
            hidden = self.layers[-1].after_attention(hidden, attended, rows)
        else:
            for layer in self.layers:
                # The features are an argument, not part of the layer: what is computed again is the layer alone.
                run = partial(recomputed, self._run) if self.recompute else self._run
                wanted = rows if layer is self.layers[-1] else None
                hidden = add_feature(layer, run(layer, hidden, rotation, segments, wanted))
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
            hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)
        return hidden

    def _run(
        self,
        layer: torch.nn.Module,
        hidden: torch.Tensor,
        rotation: Rotation,
        segments: PackedSegments,
        rows: ChosenRows | None,
    ) -> torch.Tensor:
        with get_fp8_context(self.config, layer.layer_number - 1):  # nothing where config.fp8 is not set
            return layer(hidden, rotation, segments, rows)


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
        vp_stage: int | None = None,
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
                reduce_scatter_embeddings=config.sequence_parallel,
                config=config,
                tp_group=groups.tp,
            )
        layers = get_num_layers_to_build(config, vp_stage, groups.pp.rank())
        self.decoder = DeepstackBlock(
            config,
            TransformerBlockSubmodules(
                layer_specs=[layer_spec(modules, causal=True, qk_norm=True)] * layers, layer_norm=modules.layer_norm()
            ),
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        if post_process:
            # It works on all chosen rows: what sequence parallel split is gathered before.
            self.output_layer = OutputLayer(
                sizes.hidden_size,
                sizes.vocab_size,
                config=dataclasses.replace(config, sequence_parallel=False),
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=tied,
                tp_group=groups.tp,
            )

    def use_float8(self) -> None:
        """Compute the matrix products of the layers in float8, each tensor scaled by its largest value: E4M3 forward,
        E5M2 for gradients. megatron-core then has Transformer Engine cast each weight once a step."""
        self.config.fp8, self.config.fp8_recipe = "hybrid", "tensorwise"

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """(1, t) -> (s, 1, D)."""
        embedded = self.embedding(input_ids)
        return embedded if self.config.sequence_parallel else embedded.transpose(0, 1).contiguous()

    @property
    def output_weight(self) -> torch.Tensor:
        """(vocabulary / tp, D): on the last pipeline rank, the matrix that makes logits of hidden states."""
        return self.embedding.weight if self.sizes.tied_embeddings else self.output_layer.weight

    def loss_rows(self, loss_index: torch.Tensor) -> ChosenRows:
        """The tokens that carry loss, (N,) places in t: nobody needs what the last layer makes of the others after its
        attention."""
        sharers = self.groups.tp if self.config.sequence_parallel else None
        return ChosenRows.of(loss_index, sharers, multiple=FLOAT8_ROWS if self.config.fp8 else 1)

    def losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(N,) float32 cross entropy, of the rows of `loss_rows` and the N labels."""
        if self.config.sequence_parallel:
            # The output layer gives every rank the whole gradient, of which each keeps its rows.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        return self.output_layer(hidden[: len(labels), 0], labels, self.output_weight)
