"""The shim with which megatron-core 0.16.1 runs without CUDA. The trainer installs it on machines without CUDA.

megatron-core names the CUDA device at some thirty points (buffers of DDP, of pipeline transfers, of sequence
parallelism, the type test of its optimizers, checkpoint finalisation). Two mechanisms make all of them work on a CPU:
`CpuMode` answers the tensor calls (by a public torch mechanism), and `patch_cuda` replaces the few functions of
`torch.cuda` and of megatron-core's RNG tracker that are plain Python.
"""

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as tensor_parallel_random
from torch.overrides import TorchFunctionMode

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


def install() -> None:
    """Make this process run megatron-core on the CPU, until it ends."""
    assert not torch.cuda.is_available(), "the CPU shim is for machines without CUDA"
    patch_cuda()
    patch_torch_adam()
    CpuMode().__enter__()


def patch_cuda() -> None:
    """Replace the CUDA functions that megatron-core calls as plain Python."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.random.get_rng_state()
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    tensor_parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.random.get_rng_state()
    tensor_parallel_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.random.set_rng_state(state)


def patch_torch_adam() -> None:
    """Patch the distributed optimizer so that it saves and loads torch's Adam; on a GPU too, if torch's Adam replaces
    Transformer Engine's.

    The unpatched optimizer removes `step` from the saved state of each parameter, and then fails to copy the missing
    key when it loads. It also reads the number of updates from a parameter's state, and a pipeline rank with only
    frozen layers has no such state.
    """
    original = DistributedOptimizer._set_main_param_and_optimizer_states
    original_state_dict = DistributedOptimizer.state_dict

    def with_step(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return original(self, model_param, tensors)

    def without_parameters(self):
        if self.get_parameters():
            return original_state_dict(self)
        # Rank 0, which always has parameters, writes the saved copy.
        groups = [{**group, "step": 0.0} for group in self.optimizer.state_dict()["param_groups"]]
        return {"optimizer": {"param_groups": [{k: v for k, v in g.items() if k != "params"} for g in groups]}}

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    DistributedOptimizer.state_dict = without_parameters
