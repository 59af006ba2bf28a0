"""Model FLOPs of a bin: what the arithmetic of the model needs, forward and backward. Padding is never counted.

A matrix product of (n, a) by (a, b) is 2*n*a*b; the backward pass is twice the forward one. Attention of s tokens:
4*s^2*width, half of it where it is causal. Logits, and what the last layer does after its attention,
are counted at the loss tokens alone: elsewhere nobody needs them.
"""

from trainer.balance import CostModel, Work
from trainer.batch import MicroBatch
from trainer.models.qwen3_vl.config import LanguageSizes, Qwen3VLSizes, VisionSizes

FORWARD_AND_BACKWARD = 3


def model_flops(sizes: Qwen3VLSizes, batch: MicroBatch) -> tuple[float, float]:
    """(vision, language) FLOPs of one bin."""
    work = Work(
        tokens=batch.num_tokens,
        loss_tokens=batch.num_loss_tokens,
        tokens_squared=sum(n * n for n in batch.sample_lengths),
        patches=sum(batch.image_patches),
        patches_squared=sum(n * n for n in batch.image_patches),
    )
    cost = cost_model(sizes)
    return cost.vision(work), cost.language(work)


def cost_model(sizes: Qwen3VLSizes) -> CostModel:
    """FLOPs, forward and backward, of one unit of each kind of work."""
    forward = _language(sizes.language) | _vision(sizes.vision)
    return CostModel(**{name: FORWARD_AND_BACKWARD * flops for name, flops in forward.items()})


def _language(s: LanguageSizes) -> dict[str, int]:
    width, kv_width = s.num_heads * s.head_dim, s.num_query_groups * s.head_dim
    before = 2 * s.hidden_size * (width + 2 * kv_width)
    after = 2 * s.hidden_size * (width + 3 * s.ffn_hidden_size)
    return {
        "per_token": s.num_layers * before + (s.num_layers - 1) * after,
        "per_loss_token": after + 2 * s.hidden_size * s.vocab_size,
        "per_token_squared": s.num_layers * 2 * width,
    }


def _vision(s: VisionSizes) -> dict[str, int]:
    embedding = 2 * 3 * s.patch_size**2 * s.hidden_size
    layer = 2 * s.hidden_size * (4 * s.hidden_size + 2 * s.ffn_hidden_size)
    # One product a merged block of patches: (merged, merged), then (merged, out); shared by the block's patches.
    merger = 2 * s.hidden_size * (s.hidden_size * s.spatial_merge_size**2 + s.out_hidden_size)
    return {
        "per_patch": embedding + s.num_layers * layer + (1 + len(s.deepstack_layers)) * merger,
        "per_patch_squared": s.num_layers * 4 * s.hidden_size,
    }
