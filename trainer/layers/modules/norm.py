"""The norms on CUDA, of both sets of modules."""

import torch
import torch.nn.functional as F

from trainer.layers.kernels.permission import can_import, kernels_run
from trainer.layers.module_set import TorchNorm

if can_import():
    from trainer.layers.kernels.rms_norm import rms_norm, sum_and_norm


class OnePassNorm(TorchNorm):
    """A norm in one pass: it reads and writes the input's dtype, computes in float32, and rounds once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension: (..., hidden) -> (..., hidden)."""
        if self.bias is not None:
            return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)
        if kernels_run(x.device):
            return rms_norm(x, self.weight, self.eps, zero_centred=self.zero_centred)
        if self.zero_centred:
            return super().forward(x)
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def sum_and_norm(self, x: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `TorchNorm`; one kernel forward and one backward, where ours run."""
        if self.bias is None and kernels_run(x.device):
            return sum_and_norm(x, delta, self.weight, self.eps, zero_centred=self.zero_centred)
        return super().sum_and_norm(x, delta)
