"""Qwen3-VL: the vision encoder in front of the language model.

s = tokens of this rank's part of the sequence, V = image tokens among them, D = hidden size, L = deepstack levels.
"""

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection

from dataset_builders.contracts.tokenized import PatchFormat
from trainer.data.micro_batch import MicroBatch
from trainer.families.qwen3_vl.rope import mrope_angles
from trainer.families.qwen3_vl.vision import VisionEncoder, vision_config
from trainer.layers.attention import Rotation
from trainer.layers.decoder import Between
from trainer.layers.gather import gather_rows
from trainer.layers.packed_model import PackedModel


class Qwen3VLModel(PackedModel):
    """One chunk of the model. Level i of the deepstack features is added to the image tokens after layer i."""

    def build_parts(self, dtype: torch.dtype, modules: BackendSpecProvider) -> None:
        """The vision encoder, on the first chunk."""
        if not self.pre_process:
            return
        alone = self.mesh.alone
        by_images = self.parallel.vision_split == "images"
        groups = ProcessGroupCollection(tp=alone if by_images else self.groups.tp, cp=alone, pp=alone)
        config, shape = vision_config(self.shape.vision, self.parallel, dtype), self.shape.vision
        self.vision = VisionEncoder(config, shape, modules, groups, recompute=self.parallel.recompute_vision)
        if by_images:
            # Whole on every tensor-parallel rank: the gradient norm must count it once.
            for param in self.vision.parameters():
                param.tensor_model_parallel = False

    def rotation(self, batch: MicroBatch) -> Rotation:
        """By positions of three axes."""
        return Rotation.of(mrope_angles(batch.position_ids, self.shape.language))

    def prepare_pixels(self, patch_format: PatchFormat) -> None:
        """Set how the data's patches become pixel values."""
        if self.pre_process:
            self.vision.patch_embed.set_normalisation(patch_format.image_mean, patch_format.image_std)

    def encode(self, batch: MicroBatch) -> torch.Tensor:
        """(encoded_rows, (1 + L) * D): this rank's image tokens, each with its deepstack features."""
        self.clock.switch("vision")
        # A rank without images encodes a blank one, whose token goes nowhere and whose gradient is zero.
        encoded = self.vision(batch)[: batch.encoded_rows]
        self.clock.switch_on_gradient(encoded, "vision")
        return encoded

    def embed(self, batch: MicroBatch) -> tuple[torch.Tensor, Between]:
        """Token embeddings (s, 1, D) with the image tokens in their places; features come after the first layers."""
        encoded = self.encode(batch) if batch.features is None else batch.features
        self.clock.switch("language")
        gathered = gather_rows(encoded, batch.gathered_rows, *self._sharers())
        rows = gathered.index_select(0, batch.image_rows)
        image_tokens, *features = rows.chunk(1 + self.shape.num_deepstack, dim=-1)  # each (V, D)
        places = batch.image_index
        hidden = self.language.embed(batch.input_ids)
        hidden = hidden.index_copy(0, places, image_tokens[:, None].to(hidden.dtype))

        def add_feature(number: int, hidden: torch.Tensor) -> torch.Tensor:
            if number >= len(features):
                return hidden
            return hidden.index_add(0, places, features[number][:, None].to(hidden.dtype))

        return hidden, add_feature

    def _sharers(self) -> tuple[torch.distributed.ProcessGroup, torch.distributed.ProcessGroup]:
        """The ranks that share the images of a bin, and those that hold different tokens of it."""
        encoders = self.groups.tp_cp if self.parallel.vision_split == "images" else self.groups.cp
        users = self.groups.tp_cp if self.parallel.sequence_parallel else self.groups.cp
        return encoders, users

    def partial_gradients(self) -> list[torch.nn.Parameter]:
        """Those of the vision encoder, if tensor-parallel ranks share the images."""
        shared = self.pre_process and self.parallel.vision_split == "images" and self.parallel.tp > 1
        return [p for p in self.vision.parameters() if p.requires_grad] if shared else []

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The base class's; the copies of a vision encoder that is whole on every tensor-parallel rank are numbered."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        copy = (0, self.groups.tp.rank(), self.groups.dp_cp.rank())
        for name, value in state.items():
            is_vision = name.startswith(f"{prefix}vision.") and isinstance(value, ShardedTensor | ShardedObject)
            if is_vision and self.parallel.vision_split == "images":
                value.replica_id = copy
        return state
