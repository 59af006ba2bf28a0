"""The vision encoder alone, for images that are encoded once."""

import torch
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from dataset_builders.contracts.tokenized import PatchFormat
from trainer.contract.model_shape import ModelShape
from trainer.contract.parallel import ParallelConfig
from trainer.data.micro_batch import MicroBatch
from trainer.families.qwen3_vl.vision import VisionEncoder, vision_config
from trainer.parallel.mesh import Mesh


class ImageEncoder(MegatronModule):
    """The vision encoder with its mergers, whole on this rank, under the names that its weights have in the model.

    The weights are unset until they are loaded.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, modules: BackendSpecProvider, mesh: Mesh) -> None:
        config = vision_config(shape.vision, ParallelConfig(), dtype)
        super().__init__(config)
        self.groups = ProcessGroupCollection(tp=mesh.alone, cp=mesh.alone, pp=mesh.alone)
        self.share_embeddings_and_output_weights = shape.language.tie_word_embeddings  # of the directory's weights
        self.vision = VisionEncoder(config, shape.vision, modules, self.groups)

    def prepare_pixels(self, patch_format: PatchFormat) -> None:
        """Set how the data's patches become pixel values."""
        self.vision.patch_embed.set_normalisation(patch_format.image_mean, patch_format.image_std)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """(tokens, (1 + L) * D) of the batch's images."""
        return self.vision(batch)
