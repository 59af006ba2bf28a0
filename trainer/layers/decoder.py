"""The language model of every family: embedding, decoder layers, multi-token prediction, output layer and loss.

The caller may intervene after each of the decoder's first layers.

t = tokens of this context-parallel rank, s = t / tp with sequence parallel, else t; N = loss tokens among the t,
m = rows that are selected on this rank, D = hidden size.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import make_viewless_tensor

from trainer.contract.parallel import ParallelConfig
from trainer.layers.cuda_graphs import LayerGraphs
from trainer.layers.module_set import ACTIVATIONS, FLOAT8_ROWS, shared_config
from trainer.layers.recompute import recomputed
from trainer.layers.segments import PackedSegments, Rotation, RoutedTokens, SelectedRows
from trainer.layers.vocabulary import InputEmbedding, OutputLayer
from trainer.model.shape import DecoderShape

# (index of a layer, from 0 over the whole model; output of that layer (s, 1, D)) -> input of the next layer
Between = Callable[[int, torch.Tensor], torch.Tensor]


class Embedded(NamedTuple):
    """The embedded tokens of a batch."""

    hidden: torch.Tensor  # (s, 1, D)
    between: Between | None = None  # called between the first layers with each output; None for no call
    # (s, 1, D) of the next token of each token, for multi-token prediction; None without it
    following: torch.Tensor | None = None


def decoder_config(
    shape: DecoderShape, parallel: ParallelConfig, dtype: torch.dtype, pieces: Sequence[range] = ()
) -> TransformerConfig:
    """Return megatron-core's config of the language model."""
    # The contents of each pipeline piece, in megatron-core's terms.
    layout = [["decoder"] * len(piece) for piece in pieces]
    if parallel.pp > 1:
        layout[0].insert(0, "embedding")
        layout[-1].append("loss")
    # A model without attention has no heads, and megatron-core needs some that tensor-parallel ranks divide.
    settings = {"num_attention_heads": parallel.tp}
    settings |= {name: value for part in shape.parts for name, value in part.transformer_settings().items()}
    activation = settings.pop("activation")
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        layernorm_zero_centered_gamma=shape.zero_centred_norms,
        **settings,
        # With True megatron-core calls the module set's own gate. Other gates are computed step by step.
        use_te_activation_func=activation == "silu",
        activation_func=ACTIVATIONS[activation],
        add_bias_linear=False,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        # With virtual stages two pipeline ranks exchange activations and gradients at once. A batched exchange matches
        # messages by order and would confuse the two.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        pipeline_model_parallel_layout=layout if parallel.pp > 1 else None,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        # The block recomputes whole layers; megatron-core's flag is only for the attention cores.
        recompute_granularity="selective" if parallel.recompute == "selective" else None,
        **shared_config(dtype),
    )


class DecoderBlock(TransformerBlock):
    """A transformer block over a packed bin."""

    recompute = False
    is_random = False  # whether a layer draws random numbers: adapters with dropout
    is_uniform = True
    graphs: LayerGraphs | None = None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Extend megatron-core's method, which stacks parameters of the same name unless told that layers differ."""
        if not self.is_uniform:
            metadata = {**(metadata or {}), "non_homogeneous_layers": True}
        return super().sharded_state_dict(prefix, sharded_offsets, metadata)

    def capture(self, num_tokens: int, rotary_pairs: int, num_interrupted: int, num_slots: int) -> None:
        """Replay the layers as CUDA graphs in training from now on; weights and gradients stay where they are.

        Args:
            num_interrupted: `between` is called after each of the first `num_interrupted` layers.
            num_slots: micro batches at a time between their forward and backward passes.
        """
        device = next(self.parameters()).device
        rotation = Rotation.of(torch.zeros(num_tokens, rotary_pairs, device=device))
        routed = None
        if any(layer.routes_tokens for layer in self.layers):
            # A graph reads only the tensor. The numbers are for the auxiliary loss, with which there are no graphs.
            rows = num_tokens // (self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1)
            routed = RoutedTokens(torch.ones(rows, dtype=torch.bool, device=device), 0, 0, ())
        self.graphs = LayerGraphs(list(self.layers), rotation, num_interrupted, num_slots, routed)
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
        between: Between | None,
        rows: SelectedRows | None,
    ) -> torch.Tensor:
        """Map (s, 1, D) to (s, 1, D), or only to the selected rows, which the last layer selects."""
        hidden = hidden_states if self.pre_process else self.input_tensor
        # As in megatron-core's own block: the transposed embedding of a single sample is a view.
        hidden = make_viewless_tensor(inp=hidden, requires_grad=True, keep_graph=True)

        def go_between(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            return hidden if between is None else between(layer.layer_number - 1, hidden)

        if self.graphs is not None and torch.is_grad_enabled():
            # After the last attention the number of rows differs from bin to bin, so that part has no graph.
            hidden, attended = self.graphs(hidden, rotation, segments, go_between)
            last = self.layers[-1]
            hidden, delta = last.after_attention(hidden, attended, rows, segments.routed)
            hidden = go_between(last, hidden + delta)
        else:
            for layer in self.layers:
                # Only the layer itself is recomputed, without `between`.
                run = partial(recomputed, self._run, is_random=self.is_random) if self.recompute else self._run
                own_rows = rows if layer is self.layers[-1] else None
                hidden = go_between(layer, run(layer, hidden, rotation, segments, own_rows))
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
        rows: SelectedRows | None,
    ) -> torch.Tensor:
        with get_fp8_context(self.config, layer.layer_number - 1):  # does nothing unless config.fp8 is set
            return layer(hidden, rotation, segments, rows)


class LanguageModel(MegatronModule):
    """Embedding (first pipeline rank), decoder layers, output layer and loss (last pipeline rank)."""

    def __init__(
        self,
        config: TransformerConfig,
        shape: DecoderShape,
        layers: TransformerBlockSubmodules,
        groups: ProcessGroupCollection,
        *,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.shape, self.groups = shape, groups
        self.mtp: MultiTokenPredictor | None = None  # the multi-token prediction that is trained
        self.pre_process, self.post_process = pre_process, post_process
        tied = shape.tie_word_embeddings
        if pre_process or (post_process and tied):
            self.embedding = InputEmbedding(
                shape.vocab_size,
                shape.hidden_size,
                init_method=config.init_method,
                reduce_scatter_embeddings=config.sequence_parallel,
                config=config,
                tp_group=groups.tp,
            )
        self.decoder = DecoderBlock(
            config,
            layers,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        if post_process:
            # The output layer takes all selected rows: with sequence parallelism they are gathered before it.
            self.output_layer = OutputLayer(
                shape.hidden_size,
                shape.vocab_size,
                config=dataclasses.replace(config, sequence_parallel=False),
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=tied,
                tp_group=groups.tp,
            )

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed token ids: (1, t) -> (s, 1, D)."""
        embedded = self.embedding(input_ids)
        return embedded if self.config.sequence_parallel else embedded.transpose(0, 1).contiguous()

    @property
    def output_weight(self) -> torch.Tensor:
        """(vocabulary / tp, D): the matrix from hidden states to logits, on the last pipeline rank."""
        return self.embedding.weight if self.shape.tie_word_embeddings else self.output_layer.weight

    def loss_rows(self, loss_index: torch.Tensor) -> SelectedRows:
        """Select the rows of the tokens with loss, given their (N,) indices into the t tokens: after the attention of
        the last layer no other row is needed."""
        sharers = self.groups.tp if self.config.sequence_parallel else None
        return SelectedRows.of(loss_index, sharers, multiple=FLOAT8_ROWS if self.config.fp8 else 1)

    def losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy (N,) float32 of the hidden states of `loss_rows` against the N labels."""
        if self.config.sequence_parallel:
            # The output layer gives every rank the whole gradient; each rank keeps the gradient of its own rows.
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.groups.tp
            )
        return self.output_layer(hidden[: len(labels), 0], labels, self.output_weight)


class MultiTokenPredictor(MegatronModule):
    """Multi-token prediction (MTP): a layer after the last one that predicts the token after the next, for Qwen3.5.

    For token t of a sample, with the hidden state h_t after the model's final norm:

        x_t = fc([norm_e(e_{t+1}); norm_h(h_t)])           embedding first
        logits of token t + 2 = lm_head(norm(layer(x)_t))  a layer of full attention, at the positions of t

    e_{t+1} is the input of the model's first layer at token t + 1: an image token's encoded image, else the embedding.
    Embedding and lm_head are the model's own, this class has the other modules. The norms are RMSNorms of the model's
    form, which multiply by 1 + weight.

    Source: vLLM 0.33.0, model_executor/models/qwen3_5_mtp.py (the sum and its order), models/qwen3_next.py (h_t is
    normed), v1/spec_decode/llm_base_proposer.py (token ids are shifted by one, positions are not) and
    v1/worker/gpu_model_runner.py (images are shifted as the ids are).

    Args:
        number: of the layer, from 1 over the whole model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: ModuleSpec,
        modules: BackendSpecProvider,
        groups: ProcessGroupCollection,
        *,
        number: int,
        recompute: bool,
    ) -> None:
        super().__init__(config)
        width, self.recompute = config.hidden_size, recompute
        norm = partial(
            build_module, modules.layer_norm(), config=config, hidden_size=width, eps=config.layernorm_epsilon
        )
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(), norm()
        # Every tensor-parallel rank has the projection whole. With sequence parallelism each has the gradient of its
        # own tokens, and the mark makes megatron-core sum them.
        self.fc = torch.nn.Parameter(torch.empty(width, 2 * width, dtype=config.params_dtype))
        self.fc.sequence_parallel = config.sequence_parallel
        self.layer = build_module(layer, config=config, layer_number=number, pg_collection=groups)
        self.norm = norm()

    def forward(
        self,
        hidden: torch.Tensor,
        following: torch.Tensor,
        rotation: Rotation,
        segments: PackedSegments,
        rows: SelectedRows,
    ) -> torch.Tensor:
        """Map hidden states (s, 1, D) to the hidden states (m, 1, D) from which the output layer predicts.

        Args:
            following: (s, 1, D) the first layer's input at the next token of each token.
            rows: the tokens whose token after the next is predicted.
        """
        mixed = torch.cat((self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(hidden)), dim=-1)
        run = partial(recomputed, self.layer) if self.recompute else self.layer
        return self.norm(run(F.linear(mixed, self.fc), rotation, segments, rows))
