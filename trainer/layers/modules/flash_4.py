"""Attention by FlashAttention 4. Imported only if the package flash-attn-4 is installed."""

import torch

from trainer.layers.attention_cores import FlashAttention
from trainer.layers.segments import ResultBuffers
from trainer.libraries.flash_4_private import attend_in_segments, padded


class FlashAttention4(FlashAttention):
    """Core attention by the kernels of FlashAttention 4, which are compiled when they are first called."""

    def __init__(self, *, config, **kwargs: object) -> None:
        super().__init__(config=config, **kwargs)
        # Heads of the width that the kernels need, with zeros at their end, are not copied.
        self.head_dim, self.head_width = config.kv_channels, padded(config.kv_channels)

    def _attend(self, qkv, bounds, longest: tuple[int, int], buffers: ResultBuffers | None = None) -> torch.Tensor:
        if qkv[0].dtype is torch.float32 or not len(qkv[0]):
            return super()._attend(qkv, bounds, longest)
        form = {"head_dim": self.head_dim, "causal": self.causal, "scale": self.scale}
        return attend_in_segments(qkv, bounds, longest, **form, buffers=buffers)
