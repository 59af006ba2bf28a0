"""Multi-token prediction (MTP): a layer after the last one that predicts the token after the next, for Qwen3.5.

For token t of a sample, with the hidden state h_t after the model's final norm:

    x_t = fc([norm_e(e_{t+1}); norm_h(h_t)])           embedding first
    logits of token t + 2 = lm_head(norm(layer(x)_t))  a layer of full attention, at the positions of t

e_{t+1} is the input of the model's first layer at token t + 1: an image token's encoded image, else the embedding.
Embedding and lm_head are the model's own. The norms are RMSNorms of the model's form, which multiply by 1 + weight.

Source: vLLM 0.33.0, model_executor/models/qwen3_5_mtp.py (the sum and its order), models/qwen3_next.py (h_t is normed),
v1/spec_decode/llm_base_proposer.py (token ids are shifted by one, positions are not) and v1/worker/gpu_model_runner.py
(images are shifted as the ids are).

t = tokens of this context-parallel rank, s = t / tp with sequence parallel, else t; m = rows that are chosen on this
rank, D = hidden size.
"""

from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.layers.chosen_rows import ChosenRows
from trainer.layers.segments import PackedSegments, Rotation, recomputed


class MultiTokenPredictor(MegatronModule):
    """The modules of multi-token prediction that the model does not have already. The layer's `number` counts from 1
    over the whole model."""

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
        rows: ChosenRows,
    ) -> torch.Tensor:
        """Map hidden states (s, 1, D) to the hidden states (m, 1, D) from which the output layer predicts.

        Args:
            following: (s, 1, D) the first layer's input at the next token of each token.
            rows: the tokens whose token after the next is predicted.
        """
        mixed = torch.cat((self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(hidden)), dim=-1)
        run = partial(recomputed, self.layer) if self.recompute else self.layer
        return self.norm(run(F.linear(mixed, self.fc), rotation, segments, rows))
