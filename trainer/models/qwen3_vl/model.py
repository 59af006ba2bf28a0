"""Qwen3-VL: the vision encoder in front of the language model, one bin a forward pass."""

import torch
from megatron.core.enums import ModelType
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from trainer.batch import MicroBatch
from trainer.contract import ParallelConfig
from trainer.metrics import PartClock
from trainer.models.attention import PackedSegments, Rotation
from trainer.models.qwen3_vl.config import Qwen3VLSizes, language_config, read_config, vision_config
from trainer.models.qwen3_vl.flops import model_flops
from trainer.models.qwen3_vl.language import LanguageModel
from trainer.models.qwen3_vl.rope import mrope_angles
from trainer.models.qwen3_vl.vision import VisionEncoder

__all__ = ["Qwen3VLModel", "build", "read_config"]


class Qwen3VLModel(MegatronModule):
    """The model of one pipeline rank; its weights are unset until they are loaded."""

    def __init__(
        self,
        sizes: Qwen3VLSizes,
        parallel: ParallelConfig,
        dtype: torch.dtype,
        modules: BackendSpecProvider,
        groups: ProcessGroupCollection,
        seq_len: int,
    ) -> None:
        super().__init__(language_config(sizes.language, parallel, dtype))
        self.sizes = sizes
        self.pre_process = groups.pp.rank() == 0
        self.post_process = groups.pp.rank() == groups.pp.size() - 1
        self.model_type = ModelType.encoder_or_decoder  # the schedules ask for it
        self.share_embeddings_and_output_weights = sizes.language.tied_embeddings
        self.seq_len = seq_len
        self.clock = PartClock()
        if self.pre_process:
            vision_groups = ProcessGroupCollection(tp=groups.tp, cp=groups.cp, pp=groups.pp)
            self.vision = VisionEncoder(
                vision_config(sizes.vision, parallel, dtype), sizes.vision, modules, vision_groups
            )
        self.language = LanguageModel(
            self.config,
            sizes.language,
            modules,
            groups,
            pre_process=self.pre_process,
            post_process=self.post_process,
        )

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Losses (N,) float32 of the loss tokens on the last pipeline rank, hidden states (T, 1, D) before it."""
        hidden = self.hidden_states(batch)
        return self.language.losses(hidden, batch.loss_index, batch.labels) if self.post_process else hidden

    def hidden_states(self, batch: MicroBatch) -> torch.Tensor:
        """(T, 1, D) after the last layer (and final norm) of this rank."""
        hidden, features = self._embed(batch) if self.pre_process else (None, [])
        padded = batch.cu_seqlens_padded if batch.has_gaps else None
        segments = PackedSegments.of(batch.cu_seqlens, batch.max_seqlen, padded)
        rotation = Rotation(mrope_angles(batch.position_ids, self.sizes.language))
        return self.language.decoder(hidden, rotation, segments, features, batch.image_index)

    def _embed(self, batch: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Token embeddings with the image tokens in their places, and the deepstack features."""
        self.clock.switch("vision")
        image_tokens, features = self.vision(batch)
        self.clock.switch_on_gradient(image_tokens, "vision")
        self.clock.switch("language")
        # A bin without images had a blank one encoded; none of its tokens goes on, its gradient is zero.
        count = len(batch.image_index)
        hidden = self.language.embed(batch.input_ids)
        hidden = hidden.index_copy(0, batch.image_index, image_tokens[:count, None].to(hidden.dtype))
        return hidden, [feature[:count] for feature in features]

    def flops(self, batch: MicroBatch) -> tuple[float, float]:
        """(vision, language) model FLOPs of a bin, forward and backward."""
        return model_flops(self.sizes, batch)

    def set_input_tensor(self, input_tensor: list[torch.Tensor] | torch.Tensor) -> None:
        """Called by the pipeline schedule with what the rank before sent."""
        tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor
        self.language.decoder.set_input_tensor(tensor)

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """The weight that the first and the last pipeline rank both hold when embeddings are tied."""
        has_it = self.share_embeddings_and_output_weights and (self.pre_process or self.post_process)
        return self.language.embedding.weight if has_it else None


build = Qwen3VLModel
