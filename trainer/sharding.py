"""How data-parallel ranks share the model, by `parallel.sharding`: the one place that knows of two ways.

Both give chunks that answer as megatron-core's DistributedDataParallel does, and megatron-core's optimizer: what comes
after (schedule, normalisation of gradients, clipping, update) is the same code.
"""

from typing import TypeAlias

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule

from trainer.contract import RunConfig
from trainer.distributed import Mesh
from trainer.fsdp import FullyShardedModel
from trainer.optim import build_optimizer

# What weights are held and computed in; float8 is what the language model's products make of them.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}

Chunk: TypeAlias = DistributedDataParallel | FullyShardedModel


def weights_dtype(run: RunConfig) -> torch.dtype:
    """What the bare model is built in: FSDP2 keeps float32 weights and casts them, layer by layer."""
    return torch.float32 if run.parallel.sharding == "fsdp" else DTYPES[run.train.precision]


def share_model(models: list[MegatronModule], run: RunConfig, mesh: Mesh) -> tuple[list[Chunk], ChainedOptimizer]:
    """Wrap the chunks of this rank, frozen parts frozen before, and build the optimizer of what they train."""
    if run.parallel.sharding == "fsdp":
        (model,) = models
        chunk = FullyShardedModel(model, DTYPES[run.train.precision], mesh.groups.dp)
        optimizer = build_optimizer([chunk], run.train, weights_dtype(run))
        chunk.optimize_slices(optimizer)
        return [chunk], optimizer
    chunks = _data_parallel(models)
    return chunks, build_optimizer(chunks, run.train, weights_dtype(run))


def _data_parallel(models: list[MegatronModule]) -> list[DistributedDataParallel]:
    """Each chunk in megatron-core's data parallelism; only the first overlaps with the end of backward."""
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    for module in (module for model in models for module in model.modules()):
        if hasattr(module, "fuse_wgrad_accumulation") and torch.cuda.is_available():
            # The product of the weight's gradient adds to the float32 buffer by itself. Not on a CPU, where the tests
            # hold that two bins give the same bits on one rank and on two: each bin's gradient is then one addition.
            module.fuse_wgrad_accumulation = True
    wrapped = [
        DistributedDataParallel(model.config, config, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped
