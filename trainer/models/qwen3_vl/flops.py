"""Model FLOPs of a bin: what the arithmetic of the model needs, forward and backward. Padding is never counted.

A matrix product of (n, a) by (a, b) is 2*n*a*b; the backward pass is twice the forward one. Attention of s tokens:
4*s^2*width, half of it where it is causal. Logits are counted at the loss tokens alone: elsewhere nobody needs them.
"""

from trainer.batch import MicroBatch
from trainer.models.qwen3_vl.config import LanguageSizes, Qwen3VLSizes, VisionSizes

FORWARD_AND_BACKWARD = 3


def model_flops(sizes: Qwen3VLSizes, batch: MicroBatch) -> tuple[float, float]:
    """(vision, language) FLOPs of one bin."""
    vision = _vision(sizes.vision, batch.image_patches)
    language = _language(sizes.language, batch.sample_lengths, batch.num_loss_tokens)
    return FORWARD_AND_BACKWARD * vision, FORWARD_AND_BACKWARD * language


def _language(s: LanguageSizes, sample_lengths: tuple[int, ...], loss_tokens: int) -> float:
    width, kv_width = s.num_heads * s.head_dim, s.num_query_groups * s.head_dim
    layer = 2 * s.hidden_size * (2 * width + 2 * kv_width + 3 * s.ffn_hidden_size)
    attention = 2 * width * sum(n * n for n in sample_lengths)
    head = 2 * s.hidden_size * s.vocab_size * loss_tokens
    return s.num_layers * (layer * sum(sample_lengths) + attention) + head


def _vision(s: VisionSizes, image_patches: tuple[int, ...]) -> float:
    patches = sum(image_patches)
    embedding = 2 * 3 * s.patch_size**2 * s.hidden_size
    layer = 2 * s.hidden_size * (4 * s.hidden_size + 2 * s.ffn_hidden_size)
    attention = 4 * s.hidden_size * sum(n * n for n in image_patches)
    merged = s.hidden_size * s.spatial_merge_size**2
    merger = 2 * merged * (merged + s.out_hidden_size) / s.spatial_merge_size**2
    mergers = (1 + len(s.deepstack_layers)) * merger
    return patches * (embedding + s.num_layers * layer + mergers) + s.num_layers * attention
