"""The private parts of megatron-core that the trainer calls or replaces, as they are in megatron-core 0.16.1.

    on a CPU            functions of torch.cuda that megatron-core calls, and those of its RNG tracker; `CpuMode`
    the optimizer       state_dict and the states of a parameter, for torch's Adam; the states in a checkpoint; the
                        copies of gradients and parameters
    checkpoints         the reader, the planner and the writer of files, and a step of saving
    linear layers       the product of a layer, without bias and communication

`tests/trainer/libraries/test_megatron_private.py` compares them with the installed megatron-core.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random as tensor_parallel_random
from torch.overrides import TorchFunctionMode

from dataset_builders.known_version import check_version
from trainer.libraries.torch_private import foreach_copy

KNOWN = "==0.16.1"
check_version("megatron-core", KNOWN, __name__, "gradients and checkpoints may be wrong", refuses=True)

DataParallelBase = _BaseDataParallel


def prepare_runtime() -> None:
    """Prepare this process for megatron-core, until it ends. Call it once, before the process group is made.

    megatron-core names the CUDA device at some thirty points (buffers of DDP, of pipeline transfers, of sequence
    parallelism, the type test of its optimizers, checkpoint finalisation). Without CUDA two mechanisms make all of them
    work: `CpuMode` answers the tensor calls, by a public torch mechanism, and `patch_cuda` replaces the few functions
    that are plain Python.
    """
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


def patch_cuda() -> None:
    """Replace the CUDA functions that megatron-core calls as plain Python by those of the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.random.get_rng_state()
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    tensor_parallel_random._get_cuda_rng_state = lambda *args, **kwargs: torch.random.get_rng_state()
    tensor_parallel_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.random.set_rng_state(state)


def set_device_rng_state(state: torch.Tensor) -> None:
    tensor_parallel_random._set_cuda_rng_state(state)


def patch_torch_adam() -> None:
    """Patch the distributed optimizer so that it saves and loads torch's Adam; on a GPU too, if torch's Adam replaces
    Transformer Engine's."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states
    original_state_dict = DistributedOptimizer.state_dict

    # The unpatched optimizer removes `step` from the saved state of each parameter, and fails to copy the missing key
    # when it loads.
    def with_step(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        return original(self, model_param, tensors)

    # It also reads the number of updates from a parameter's state, which a pipeline rank with only frozen layers lacks.
    def without_parameters(self):
        if self.get_parameters():
            return original_state_dict(self)
        # trainer/checkpoint/save_and_load.py sets the number of updates.
        groups = [{**group, "step": 0.0} for group in self.optimizer.state_dict()["param_groups"]]
        return {"optimizer": {"param_groups": [{k: v for k, v in g.items() if k != "params"} for g in groups]}}

    DistributedOptimizer._set_main_param_and_optimizer_states = with_step
    DistributedOptimizer.state_dict = without_parameters


def replace_param_state(state_of: Callable[..., dict[int, dict[str, object]]]) -> None:
    """Make the distributed optimizer write and request the tensors of its checkpoint by `state_of`."""
    DistributedOptimizer.sharded_param_state_fully_reshardable = state_of


def first_held(optimizer: DistributedOptimizer, param: torch.Tensor) -> int:
    """Return the flat index of the first number of a parameter that this data-parallel rank updates."""
    return optimizer._get_model_param_range_map(param)["param"].start


def held_tensors(optimizer: DistributedOptimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return this rank's numbers of a parameter ("param") and, after the first update, of its moments."""
    return optimizer._get_main_param_and_optimizer_states(param)


def shorten_copies(optimizer: DistributedOptimizer) -> None:
    """Let an optimizer make its views of the gradients and of the parameters once, not for each update, and write all
    parameters by one operation. float8 parameters, which are written in another way, must not be among them."""
    optimizer.__class__ = _ShortCopies


class _ShortCopies(DistributedOptimizer):
    gradients: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # (parameter of the update, view of its gradient)
    copies: list[list[torch.Tensor]] | None = None  # views of the model's parameters, and their sources

    def _copy_model_grads_to_main_grads(self) -> None:
        if self.gradients is None:
            super()._copy_model_grads_to_main_grads()
            self.gradients = [(param, param.grad) for param in self.get_parameters()]
        for param, grad in self.gradients:
            param.grad = grad

    def _copy_main_params_to_model_params(self) -> None:
        if self.copies is None:
            sources = itertools.chain(*self.shard_fp32_from_float16_groups, *self.shard_fp32_groups)
            views = []
            for param in itertools.chain(*self.model_float16_groups, *self.model_fp32_groups):
                # The part of the parameter that this rank updates, as a view of the parameter's buffer.
                buffer, _, bucket = self.model_param_gbuf_map[param]
                place = self._get_model_param_range_map(param)["gbuf_world_in_bucket"]
                views.append(self.buffers[buffer].buckets[bucket].param_data.view(-1)[place.start : place.end])
            self.copies = [views, list(sources)]
        if self.copies[0]:
            foreach_copy(*self.copies)


def replace_readers(planner: type, make_reader: Callable[[Any], object]) -> None:
    """Make megatron-core read checkpoints by a planner of ours, and by the reader of a checkpoint's directory."""
    torch_strategy.MCoreLoadPlanner = planner
    torch_strategy._get_filesystem_reader = lambda checkpoint_dir, cache_metadata=False: make_reader(checkpoint_dir)


def replace_writer(writer: type[FileSystemWriterAsync]) -> None:
    """Make megatron-core write the files of a checkpoint by this class."""
    torch_strategy.FileSystemWriterAsync = writer


class OneFile(TorchDistSaveShardedStrategy):
    """megatron-core's saving strategy with one file per rank."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        self.file: FileSystemWriterAsync | None = None  # the writer of this rank's file, after planning

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, save_state_dict_ret: Any) -> AsyncRequest:
        self.file = writer
        return super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)


class OneRankProduct:
    """A mixin for linear layers that replaces megatron-core's product on a single tensor-parallel rank by `product`."""

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x weight^T + bias."""
        raise NotImplementedError

    def _forward_impl(self, input, weight, bias=None, **settings):
        if self.tp_group.size() > 1:
            return super()._forward_impl(input=input, weight=weight, bias=bias, **settings)
        return self.product(input, weight, bias)
