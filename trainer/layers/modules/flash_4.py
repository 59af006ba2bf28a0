"""Attention by FlashAttention 4. Imported only if the package flash-attn-4 is installed."""

import torch

from trainer.layers.attention_cores import FlashAttention
from trainer.libraries.flash_4_private import attend_in_segments


class FlashAttention4(FlashAttention):
    """Core attention by the kernels of FlashAttention 4, which are compiled when they are first called."""

    def _attend(self, query, key, value, query_bounds, key_bounds, most_queries: int, most_keys: int) -> torch.Tensor:
        if query.dtype is torch.float32 or not len(query):
            return super()._attend(query, key, value, query_bounds, key_bounds, most_queries, most_keys)
        return attend_in_segments(
            *(query, key, value, (query_bounds, key_bounds), (most_queries, most_keys)),
            causal=self.causal,
            scale=self.scale,
        )
