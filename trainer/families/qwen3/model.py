"""Qwen3: only the language model, with positions on one axis.

The forward pass of a bin (`PackedModel.forward` in trainer/layers/packed_model.py), step by step:

1. Embedding: ids of tokens are looked up (`PackedModel.embed`).
2. Positions: `rotation` makes the angles of each token from its position in its sample (trainer/layers/segments.py).
3. Layers (trainer/layers/packed_layer.py): a norm, attention over the token's own sample, with norms of queries and
   keys (trainer/parts/attention/module.py), a norm, a gated MLP (trainer/parts/mlp/module.py).
4. After the attention of the last layer only the tokens with loss go on (trainer/layers/segments.py): final norm,
   logits and cross entropy (trainer/layers/vocabulary.py).
5. Their sum and number are the loss (trainer/loop/loss.py).
"""

from trainer.data.micro_batch import MicroBatch
from trainer.layers.packed_model import PackedModel
from trainer.layers.segments import Rotation, rope_angles


class Qwen3Model(PackedModel):
    """One chunk of the model."""

    def rotation(self, batch: MicroBatch) -> Rotation:
        """Rotate by each token's position in its sample: without images the three axes of `position_ids` are equal."""
        shape = self.shape.language
        return Rotation.of(rope_angles(batch.position_ids[0], shape.rope_theta, shape.rotary_dim))
