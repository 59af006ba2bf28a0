"""One chunk of a model of any family. A forward pass takes one bin.

A process holds one chunk, or several with virtual pipeline stages. The first chunk of the first pipeline rank has the
embedding, and the vision encoder if there is one; the last chunk of the last rank has the output layer and the loss.

t = tokens of this context-parallel rank, s = t / tp with sequence parallel, else t; N = loss tokens among the t,
D = hidden size.
"""

from pkgutil import resolve_name

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.enums import ModelType
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from dataset_builders.contracts.tokenized import PatchFormat
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.data.micro_batch import MicroBatch
from trainer.layers.decoder import Embedded, LanguageModel, MultiTokenPredictor
from trainer.layers.measures import PartClock, Reports
from trainer.layers.module_set import layer_around
from trainer.layers.packed_layer import PackedLayer
from trainer.layers.segments import PackedSegments, Rotation, RoutedTokens, SelectedRows
from trainer.layers.sharded_parameters import mark_tensor_parallel
from trainer.model.layer import Layer
from trainer.model.shape import ModelShape
from trainer.parallel.mesh import Mesh
from trainer.parallel.vision.exchange import PipelineWorker, VisionOwner


class PackedModel(MegatronModule):
    """One chunk of a model, whose weights are unset until they are loaded. This class is only a language model.

    A family defines how positions rotate a head (`rotation`), and may define other parts of a chunk (`build_parts`) and
    how tokens are embedded (`embed`). The shape defines the layers. Every chunk needs a `config` of its own, see
    `decoder_config`.
    """

    # Whether the model is trained by adapters, and modules trained whole, alone. This chunk may hold none of them.
    has_adapters = False
    mtp_loss_scaling_factor = 0.0  # factor of the loss of multi-token prediction

    def __init__(
        self,
        shape: ModelShape,
        parallel: ParallelConfig,
        config: TransformerConfig,
        modules: BackendSpecProvider,
        mesh: Mesh,
        seq_len: int,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.shape, self.parallel, self.mesh, self.groups = shape, parallel, mesh, mesh.groups
        pp, stage = mesh.groups.pp, vp_stage or 0
        self.vp_stage = vp_stage
        # megatron-core's names for "has the embedding" and "has the output layer"; its schedules read them.
        self.pre_process = pp.rank() == 0 and stage == 0
        self.post_process = pp.rank() == pp.size() - 1 and stage == parallel.vpp - 1
        self.model_type = ModelType.encoder_or_decoder  # the schedules read it
        self.share_embeddings_and_output_weights = shape.language.tie_word_embeddings
        self.seq_len = seq_len
        # A training replaces both by those of its `StepContext`; a chunk that is built for something else has its own.
        self.clock = PartClock()
        self.reports = Reports()
        # Set if the ranks that encode image tokens are not the ranks that use them, and this rank takes part.
        self.exchange: VisionOwner | PipelineWorker | None = None
        for mixer in shape.language.mixers:
            if mixer.check_device:
                resolve_name(mixer.check_device)(mixer, config.params_dtype, mesh.device)
        self.build_parts(config.params_dtype, modules)
        first = get_transformer_layer_offset(config, vp_stage, pp.rank())
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage, pp.rank()))
        # Specs of all layers, because those of other chunks decide with the own whether a checkpoint stacks layers.
        kinds = [layer_spec(layer, modules) for layer in shape.language.layers]
        self.language = LanguageModel(
            config,
            shape.language,
            TransformerBlockSubmodules([kinds[number] for number in numbers], modules.layer_norm()),
            mesh.groups,
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=vp_stage,
        )
        self.language.decoder.recompute = is_recomputed = parallel.recompute == "full"
        # Layers that take chunks have parameters of several runs of rows, which `in_runs` does not stack.
        self.language.decoder.is_uniform = all(kind == kinds[0] for kind in kinds) and not shape.language.in_chunks
        if shape.language.mtp is not None:
            spec, number = layer_spec(shape.language.mtp.layer, modules), shape.language.num_layers + 1
            self.language.mtp = MultiTokenPredictor(
                config, spec, modules, mesh.groups, number=number, recompute=is_recomputed
            )
        mark_tensor_parallel(self)
        tied = self.shared_embedding_or_output_weight()
        if tied is not None and mesh.groups.pp.size() > 1:
            # megatron-core sums the gradients of the two copies, on the first and the last pipeline rank, by these
            # marks.
            tied.shared_embedding = True
            tied.shared = not self.pre_process  # the copy that the gradient norm does not count

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Return losses (N,) float32 of this rank's loss tokens on the last chunk, else hidden states (s, 1, D). In a
        training with multi-token prediction its losses (M,) follow."""
        if not self.post_process:
            return self.hidden_states(batch)
        if not self.predicts_second:
            hidden = self.hidden_states(batch, self.language.loss_rows(batch.loss_index))
            return self.language.losses(hidden, batch.labels)
        # Multi-token prediction goes on from the hidden states of all tokens, so the last layer computes all of them.
        embedded, rotation, segments = self.embed(batch), self.rotation(batch), self._segments(batch)
        hidden = self.language.decoder(embedded.hidden, rotation, segments, embedded.between, None)
        rows = self.language.loss_rows(batch.loss_index)
        losses = self.language.losses(rows.of_hidden(hidden), batch.labels)
        rows = self.language.loss_rows(batch.second_index)
        hidden = self.language.mtp(hidden, embedded.following, rotation, segments, rows)
        return torch.cat((losses, self.language.losses(hidden, batch.second_labels)))

    def hidden_states(self, batch: MicroBatch, rows: SelectedRows | None = None) -> torch.Tensor:
        """Return (s, 1, D) after the last layer (and final norm) of this chunk, or only the selected rows."""
        hidden, between, _ = self.embed(batch) if self.pre_process else (None, None, None)
        return self.language.decoder(hidden, self.rotation(batch), self._segments(batch), between, rows)

    @property
    def predicts_second(self) -> bool:
        """Whether the token after the next is predicted too: in training, not in an evaluation."""
        return self.language.mtp is not None and self.training

    def _segments(self, batch: MicroBatch) -> PackedSegments:
        routed = None
        if self.shape.language.routes_tokens:
            routed = RoutedTokens.of(batch, self.groups.cp, self.groups.tp if self.config.sequence_parallel else None)
        cp = self.parallel.cp
        return PackedSegments.of(batch.cu_seqlens, batch.max_seqlen, cp, batch.cp_order, batch.chunks, routed)

    # What a family defines or extends.

    def rotation(self, batch: MicroBatch) -> Rotation:
        """Return the rotation of queries and keys by the positions of the t tokens."""
        raise NotImplementedError

    def embed(self, batch: MicroBatch) -> Embedded:
        """Embed the tokens of a batch, on the first chunk."""
        self.clock.switch("language")
        following = self.language.embed(batch.next_ids) if self.predicts_second else None
        return Embedded(self.language.embed(batch.input_ids), following=following)

    def build_parts(self, dtype: torch.dtype, modules: BackendSpecProvider) -> None:
        """Build the parts of this chunk that come before the language model."""

    def prepare_pixels(self, patch_format: PatchFormat) -> None:
        """Set how the patches of the data are converted to pixel values."""

    def partial_gradients(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients must be summed over the tensor-parallel ranks: every rank holds such a
        parameter whole, but only a part of its gradient."""
        layers = [module for module in self.modules() if isinstance(module, PackedLayer)]
        return [param for layer in layers for param in layer.self_attention.partial_gradients()]

    # What the set-up of a training calls.

    def prepare_training(self, train: TrainConfig) -> None:
        """Set the factor of the second loss. Tell the layers that route tokens how they are trained, and where they
        report."""
        layers = list(self.language.decoder.layers)
        if self.language.mtp is not None:
            self.mtp_loss_scaling_factor = train.mtp_loss_scaling_factor
            layers.append(self.language.mtp.layer)
        for layer in layers:
            if layer.routes_tokens:
                # megatron-core counts layers from 1.
                layer.mlp.prepare_training(train, layer.layer_number - 1, self.reports)

    def capture_graphs(self, num_micro_batches: int) -> None:
        """Replay the language model's layers as CUDA graphs in training from now on.

        All ranks must call this method, after the memory of weights and gradients is allocated and while the gradients
        are zero.
        """
        self.train()
        pairs, levels = self.shape.language.rotary_dim // 2, self.shape.num_deepstack if self.pre_process else 0
        # A pipeline rank holds no more micro batches of a step than there are ranks from itself to the last one.
        at_a_time = min(num_micro_batches, self.groups.pp.size() - self.groups.pp.rank())
        self.language.decoder.capture(self.seq_len // self.parallel.cp, pairs, levels, at_a_time)

    def release_graphs(self) -> None:
        """Launch the layers' kernels one by one again, and free the graphs and their memory."""
        self.language.decoder.release()

    # What megatron-core calls: its pipeline schedule, the sum of a tied embedding's gradients, and its checkpoints.

    def set_input_tensor(self, input_tensor: list[torch.Tensor] | torch.Tensor) -> None:
        """Set the hidden states that the previous pipeline rank has sent."""
        tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.language.decoder.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """Return the weight that the first and last pipeline ranks share if embeddings are tied; None elsewhere."""
        has_it = self.share_embeddings_and_output_weights and (self.pre_process or self.post_process)
        return self.language.embedding.weight if has_it else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Extend megatron-core's method: mark the second copy of a tied weight as a replica."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        tied = state.get(f"{prefix}language.embedding.weight")
        if isinstance(tied, ShardedTensor | ShardedObject) and not self.pre_process:
            tied.replica_id = (1, 0, self.groups.dp_cp.rank())
        return state


def layer_spec(layer: Layer, modules: BackendSpecProvider) -> ModuleSpec:
    mixer, feed_forward = (resolve_name(half.spec)(half, modules) for half in layer.halves)
    return layer_around(mixer, feed_forward, modules)
