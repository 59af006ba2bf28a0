"""Qwen3-VL: the vision encoder in front of the language model, one bin a forward pass.

A process holds one chunk of it, or several with virtual pipeline stages. The first chunk of the first pipeline rank has
the vision encoder and the embedding, the last chunk of the last rank the output layer and the loss.
"""

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.enums import ModelType
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from trainer.balance import CostModel
from trainer.batch import MicroBatch
from trainer.contract import ParallelConfig
from trainer.distributed import Mesh
from trainer.metrics import PartClock
from trainer.models.attention import PackedSegments, Rotation
from trainer.models.gather import gather_rows
from trainer.models.module_set import mark_tensor_parallel
from trainer.models.qwen3_vl.config import Qwen3VLSizes, language_config, read_config, vision_config
from trainer.models.qwen3_vl.flops import cost_model, model_flops
from trainer.models.qwen3_vl.language import LanguageModel
from trainer.models.qwen3_vl.rope import mrope_angles
from trainer.models.qwen3_vl.vision import VisionEncoder
from trainer.models.rows import ChosenRows

__all__ = ["Qwen3VLModel", "build", "read_config"]


class Qwen3VLModel(MegatronModule):
    """One chunk of the model; its weights are unset until they are loaded."""

    def __init__(
        self,
        sizes: Qwen3VLSizes,
        parallel: ParallelConfig,
        dtype: torch.dtype,
        modules: BackendSpecProvider,
        mesh: Mesh,
        seq_len: int,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(language_config(sizes.language, parallel, dtype))
        self.sizes, self.parallel, self.mesh, self.groups = sizes, parallel, mesh, mesh.groups
        pp, stage = mesh.groups.pp, vp_stage or 0
        self.vp_stage = vp_stage
        self.pre_process = pp.rank() == 0 and stage == 0
        self.post_process = pp.rank() == pp.size() - 1 and stage == parallel.vpp - 1
        self.model_type = ModelType.encoder_or_decoder  # the schedules ask for it
        self.share_embeddings_and_output_weights = sizes.language.tied_embeddings
        self.seq_len = seq_len
        self.clock = PartClock()
        if self.pre_process:
            self.vision = self._build_vision(dtype, modules)
        self.language = LanguageModel(
            self.config,
            sizes.language,
            modules,
            mesh.groups,
            pre_process=self.pre_process,
            post_process=self.post_process,
            vp_stage=vp_stage,
        )
        self.language.decoder.recompute = parallel.recompute == "full"
        mark_tensor_parallel(self)
        self._mark_tied_weight()

    def _build_vision(self, dtype: torch.dtype, modules: BackendSpecProvider) -> VisionEncoder:
        alone = self.mesh.alone
        by_images = self.parallel.vision_split == "images"
        groups = ProcessGroupCollection(tp=alone if by_images else self.groups.tp, cp=alone, pp=alone)
        config = vision_config(self.sizes.vision, self.parallel, dtype)
        vision = VisionEncoder(config, self.sizes.vision, modules, groups, recompute=self.parallel.recompute_vision)
        if by_images:
            # Whole on every tensor-parallel rank: the gradient norm must count it once.
            for param in vision.parameters():
                param.tensor_model_parallel = False
        return vision

    def _mark_tied_weight(self) -> None:
        """Tell megatron-core which weight the first and the last pipeline rank both hold."""
        weight = self.shared_embedding_or_output_weight()
        if weight is not None and self.groups.pp.size() > 1:
            weight.shared_embedding = True
            weight.shared = not self.pre_process  # the copy that the gradient norm does not count

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Losses (N,) float32 of this rank's loss tokens from the last chunk, hidden states (s, 1, D) before it."""
        if not self.post_process:
            return self.hidden_states(batch)
        hidden = self.hidden_states(batch, self.language.loss_rows(batch.loss_index))
        return self.language.losses(hidden, batch.labels.values)

    def hidden_states(self, batch: MicroBatch, rows: ChosenRows | None = None) -> torch.Tensor:
        """(s, 1, D) after the last layer (and final norm) of this chunk, or the chosen rows of it alone."""
        hidden, features = self._embed(batch) if self.pre_process else (None, ())
        segments = PackedSegments.of(batch.cu_seqlens, batch.max_seqlen, self.parallel.cp)
        rotation = Rotation.of(mrope_angles(batch.position_ids, self.sizes.language))
        return self.language.decoder(hidden, rotation, segments, features, batch.image_index, rows)

    def capture_graphs(self) -> None:
        """Have training replay the language model's layers as CUDA graphs; to be called by all ranks, when weights and
        gradients have their places and the gradients are zero."""
        levels = len(self.sizes.vision.deepstack_layers)
        self.language.decoder.capture(self.seq_len // self.parallel.cp, levels)

    def release_graphs(self) -> None:
        """Have training launch the layers' kernels one by one again; the graphs and their memory are given up."""
        self.language.decoder.release()

    def _embed(self, batch: MicroBatch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Token embeddings with the image tokens in their places, and the deepstack features of these tokens."""
        self.clock.switch("vision")
        # A rank without images had a blank one encoded; its token goes nowhere, its gradient is zero.
        encoded = self.vision(batch)[: batch.encoded_rows]
        self.clock.switch_on_gradient(encoded, "vision")
        self.clock.switch("language")
        gathered = gather_rows(encoded, batch.gathered_rows, *self._sharers())
        rows = gathered.index_select(0, batch.image_rows)
        image_tokens, *features = rows.chunk(1 + len(self.sizes.vision.deepstack_layers), dim=-1)
        hidden = self.language.embed(batch.input_ids)
        hidden = hidden.index_copy(0, batch.image_index, image_tokens[:, None].to(hidden.dtype))
        return hidden, tuple(features)

    def _sharers(self) -> tuple[torch.distributed.ProcessGroup, torch.distributed.ProcessGroup]:
        """The ranks that share the images of a bin, and those that hold different tokens of it."""
        encoders = self.groups.tp_cp if self.parallel.vision_split == "images" else self.groups.cp
        users = self.groups.tp_cp if self.parallel.sequence_parallel else self.groups.cp
        return encoders, users

    def partial_gradients(self) -> list[torch.nn.Parameter]:
        """Parameters that are whole on every tensor-parallel rank while each has a part of their gradient: the vision
        encoder's where the ranks share its images. Their gradients are to be summed over these ranks."""
        shared = self.pre_process and self.parallel.vision_split == "images" and self.parallel.tp > 1
        return [p for p in self.vision.parameters() if p.requires_grad] if shared else []

    def flops(self, batch: MicroBatch) -> tuple[float, float]:
        """(vision, language) model FLOPs of a bin, forward and backward."""
        return model_flops(self.sizes, batch)

    def cost_model(self) -> CostModel:
        """What a bin costs, in model FLOPs; the same on every rank."""
        return cost_model(self.sizes)

    def set_input_tensor(self, input_tensor: list[torch.Tensor] | torch.Tensor) -> None:
        """Called by the pipeline schedule with what the rank before sent."""
        tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.language.decoder.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """The weight that the first and the last pipeline rank both hold when embeddings are tied."""
        has_it = self.share_embeddings_and_output_weights and (self.pre_process or self.post_process)
        return self.language.embedding.weight if has_it else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """megatron-core's, with the copies of tied and shared weights numbered as copies."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        copy = self.groups.dp_cp.rank()
        for name, value in state.items():
            if not isinstance(value, ShardedTensor | ShardedObject):
                continue
            if name.startswith(f"{prefix}vision.") and self.parallel.vision_split == "images":
                value.replica_id = (0, self.groups.tp.rank(), copy)
            elif name == f"{prefix}language.embedding.weight" and not self.pre_process:
                value.replica_id = (1, 0, copy)
        return state


build = Qwen3VLModel
