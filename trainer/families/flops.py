"""Model FLOPs of a bin: those of the model's arithmetic, forward and backward, without padding.

A matrix product of (n, a) by (a, b) is 2*n*a*b; the backward pass is twice the forward pass. Attention of s tokens:
4*s^2*width, and half of that if it is causal. Logits, and the last layer after its attention, count for the loss tokens
alone: for other tokens they are not needed.
"""

from trainer.contract.model_shape import ModelShape, Work
from trainer.data.balance import CostModel
from trainer.data.micro_batch import MicroBatch

FORWARD_AND_BACKWARD = 3


def model_flops(shape: ModelShape, batch: MicroBatch) -> dict[str, float]:
    """FLOPs of one bin, of the language model and of the vision encoder if there is one; none are of an encoder whose
    features were read."""
    work = Work(
        tokens=batch.num_tokens,
        loss_tokens=batch.num_loss_tokens,
        tokens_squared=sum(n * n for n in batch.sample_lengths),
        patches=sum(batch.image_patches),
        patches_squared=sum(n * n for n in batch.image_patches),
    )
    cost = cost_model(shape)
    encoded = 0.0 if batch.are_features_read else cost.vision(work)
    vision = {} if shape.vision is None else {"vision": encoded}
    return {**vision, "language": cost.language(work)}


def cost_model(shape: ModelShape) -> CostModel:
    """FLOPs, forward and backward, of one unit of each kind of work."""
    return CostModel(**{name: FORWARD_AND_BACKWARD * flops for name, flops in shape.forward_flops.items()})
