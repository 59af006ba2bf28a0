"""The private parts of megatron-core are as `trainer/libraries/megatron_private.py` expects them."""

from collections.abc import Iterator

import pytest

from tests.helpers.private_parts import changed, fail_if_changed, unmentioned

ADAM = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
FILES = "megatron.core.dist_checkpointing.strategies.torch"
PRODUCT = ["self", "input", "weight", "*args", "**kwargs"]
RECORDED = {
    "megatron.core.tensor_parallel.random:_get_cuda_rng_state": ["device='cuda'", "clone=False", "graph_safe=False"],
    "megatron.core.tensor_parallel.random:_set_cuda_rng_state": ["new_state", "device=-1", "graph_safe=False"],
    "megatron.core.distributed.data_parallel_base:_BaseDataParallel": ["config", "module"],
    f"{ADAM}._set_main_param_and_optimizer_states": ["self", "model_param", "tensors"],
    f"{ADAM}._get_main_param_and_optimizer_states": ["self", "model_param"],
    f"{ADAM}._get_model_param_range_map": ["self", "param"],
    f"{ADAM}._copy_model_grads_to_main_grads": ["self"],
    f"{ADAM}._copy_main_params_to_model_params": ["self"],
    f"{ADAM}.state_dict": ["self"],
    f"{ADAM}.sharded_param_state_fully_reshardable": [
        *("self", "model_sharded_state_dict", "is_loading=False", "metadata=None"),
    ],
    f"{FILES}:_get_filesystem_reader": ["checkpoint_dir", "cache_metadata=False"],
    f"{FILES}:MCoreLoadPlanner": [
        *("*args", "shapes_validation_sharded_tensors=()", "allow_shape_mismatch_sharded_tensors=None", "**kwargs"),
    ],
    f"{FILES}:MCoreLoadPlanner.load_bytes": ["self", "read_item", "value"],
    f"{FILES}:FileSystemWriterAsync": ["path", "*args", "separation_hint=None", "use_msc=False", "**kwargs"],
    f"{FILES}:FileSystemWriterAsync.prepare_write_data": ["self", "plan", "planner"],
    f"{FILES}:FileSystemWriterAsync.get_save_function_and_args": ["self"],
    f"{FILES}:FileSystemWriterAsync.retrieve_write_results": ["self"],
    f"{FILES}:TorchDistSaveShardedStrategy": [
        *("backend", "version", "keep_only_main_replica=True", "thread_count=2", "cached_metadata=False"),
        "separation_hint=None",
    ],
    f"{FILES}:TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks": ["self", "writer", "save_state_dict_ret"],
    "megatron.core.tensor_parallel:ColumnParallelLinear._forward_impl": PRODUCT,
    "megatron.core.tensor_parallel:RowParallelLinear._forward_impl": PRODUCT,
}


def changes() -> Iterator[str]:
    yield from changed(RECORDED)
    # Each replaced name has an effect only while its callers look it up where we replace it.
    from megatron.core.dist_checkpointing.strategies import torch as files
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    callers = {
        "_get_filesystem_reader": files.TorchDistLoadShardedStrategy.load,
        "MCoreLoadPlanner": files.TorchDistLoadShardedStrategy.load,
        "FileSystemWriterAsync": files.TorchDistSaveShardedStrategy.async_save,
        "_get_save_and_finalize_callbacks": files.TorchDistSaveShardedStrategy.async_save,
        "sharded_param_state_fully_reshardable": DistributedOptimizer.sharded_state_dict,
        "_copy_model_grads_to_main_grads": MixedPrecisionOptimizer.prepare_grads.__wrapped__,
        "_copy_main_params_to_model_params": MixedPrecisionOptimizer.step_with_ready_grads.__wrapped__,
    }
    for name, caller in callers.items():
        yield from unmentioned(caller, name)


@pytest.mark.full
def test_megatron_cores_private_parts():
    fail_if_changed("megatron-core", __name__)
