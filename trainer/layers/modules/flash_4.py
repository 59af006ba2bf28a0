"""Attention by FlashAttention 4. Imported only if the package flash-attn-4 is installed."""

import torch

from trainer.layers.attention_cores import FlashAttention
from trainer.libraries.flash_4_private import attend_in_segments, padded


class FlashAttention4(FlashAttention):
    """Core attention by the kernels of FlashAttention 4, which are compiled when they are first called.

    Attributes:
        head_width: the width that the kernels need; heads of this width, with zeros at their end, are not copied.
    """

    def __init__(self, *, config, **kwargs: object) -> None:
        super().__init__(config=config, **kwargs)
        self.head_dim, self.head_width = config.kv_channels, padded(config.kv_channels)

    def _attend(self, query, key, value, query_bounds, key_bounds, most_queries: int, most_keys: int) -> torch.Tensor:
        if query.dtype is torch.float32 or not len(query):
            return super()._attend(query, key, value, query_bounds, key_bounds, most_queries, most_keys)
        return attend_in_segments(
            *(query, key, value, (query_bounds, key_bounds), (most_queries, most_keys)),
            causal=self.causal,
            scale=self.scale,
            head_dim=self.head_dim,
        )
