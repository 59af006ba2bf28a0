"""Qwen3: only the language model, with positions on one axis."""

from trainer.data.micro_batch import MicroBatch
from trainer.layers.packed_model import PackedModel
from trainer.layers.segments import Rotation, rope_angles


class Qwen3Model(PackedModel):
    """One chunk of the model."""

    def rotation(self, batch: MicroBatch) -> Rotation:
        """Rotate by each token's position in its sample: without images the three axes of `position_ids` are equal."""
        shape = self.shape.language
        return Rotation.of(rope_angles(batch.position_ids[0], shape.rope_theta, shape.rotary_dim))
