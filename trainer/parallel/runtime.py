"""Preparation of this process for megatron-core: on a machine without CUDA, a shim with which it runs on the CPU.

megatron-core 0.16.1 names the CUDA device at some thirty points (buffers of DDP, of pipeline transfers, of sequence
parallelism, the type test of its optimizers, checkpoint finalisation). Two mechanisms make all of them work on a CPU:
`CpuMode` answers the tensor calls (by a public torch mechanism), and `patch_cuda` in
`trainer/libraries/megatron_private.py` replaces the few functions that are plain Python.
"""

import torch
from torch.overrides import TorchFunctionMode

from trainer.libraries.megatron_private import patch_cuda, patch_torch_adam


def prepare_runtime() -> None:
    """Prepare this process, until it ends. Call it once, before the process group is made."""
    if torch.cuda.is_available():
        return
    patch_cuda()
    patch_torch_adam()
    CpuMode().__enter__()  # subnormals are not flushed: 10% faster for delta layers, and other bits in every training


_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
}


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class CpuMode(TorchFunctionMode):
    """A torch mode in which tensors requested on CUDA are made on the CPU, and report the CUDA name of their type."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name = func(*args)
            return _CUDA_TYPE_NAMES.get(name, name)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)
