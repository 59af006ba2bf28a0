"""The sharing of the model among data-parallel ranks, by `parallel.sharding`. Only this file knows both ways.

In both ways, the chunks have the interface of megatron-core's DistributedDataParallel and the optimizer is
megatron-core's. All other code (schedule, normalisation of gradients, clipping, update) is the same.
"""

from functools import partial
from typing import TypeAlias

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.transformer.module import MegatronModule

from trainer.checkpoint.adapter_files import load_peft_directory
from trainer.checkpoint.hf_read import HFTensors, load_hf_weights, read_part
from trainer.checkpoint.save_and_load import state_of_model
from trainer.contract.run import RunConfig
from trainer.layers.lora.convert import begin_adapters
from trainer.layers.lora.trained import trained_rules
from trainer.loop.optim import build_optimizer
from trainer.model.adapters import adapted_layers
from trainer.model.family import Family
from trainer.parallel.fsdp import FullyShardedModel
from trainer.parallel.mesh import Mesh
from trainer.parallel.vision.main_grads import fuse_gradients

# The dtype of the weights; with float8 the language model's matrix products cast them.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}

Chunk: TypeAlias = DistributedDataParallel | FullyShardedModel


def weights_dtype(run: RunConfig) -> torch.dtype:
    """Return the dtype in which the bare model is built. FSDP2 keeps float32 weights and casts them layer by layer."""
    return torch.float32 if run.execution.parallel.sharding == "fsdp" else DTYPES[run.train.precision]


def share_model(
    models: list[MegatronModule], run: RunConfig, mesh: Mesh, family: Family
) -> tuple[list[Chunk], ChainedOptimizer]:
    """Return the wrapped chunks of this rank and the optimizer of their trained parts. Frozen parts must be frozen
    before. FSDP2 also divides a model without memory; each rank's slices are then filled here."""
    if run.execution.parallel.sharding == "fsdp":
        (model,) = models
        has_memory = not next(model.parameters()).is_meta
        precision, state = DTYPES[run.train.precision], state_of_model(model)
        chunk = FullyShardedModel(model, precision, mesh.groups.dp, mesh.device, state)
        if not has_memory:
            _fill(model, run, family)
        optimizer = build_optimizer([chunk], run.train, weights_dtype(run), family)
        chunk.optimize_slices(optimizer)
        return [chunk], optimizer
    chunks = _data_parallel(models)
    return chunks, build_optimizer(chunks, run.train, weights_dtype(run), family)


def _fill(model: MegatronModule, run: RunConfig, family: Family) -> None:
    """Fill the slices of a divided model with the weights of `run.hf_dir`, and initialise its adapters."""
    rules, config = family.weight_rules(model.shape), run.train.adapter
    load_hf_weights(model, run.hf_dir, rules, family.copied)
    if config is None:
        return
    source = HFTensors(run.hf_dir)
    read = partial(read_part, source, model=model)
    begin_adapters(model, adapted_layers(rules, config), config, run.train.seed, read)
    if run.adapter_dir is not None:
        load_peft_directory([model], run.adapter_dir, trained_rules(rules, config))


def _data_parallel(models: list[MegatronModule]) -> list[DistributedDataParallel]:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    for model in models:
        fuse_gradients(model)
    wrapped = [
        # Only the first chunk reduces gradients in buckets in backward.
        DistributedDataParallel(model.config, config, model, disable_bucketing=number > 0)
        for number, model in enumerate(models)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            # A rank alone has the sum of its gradients and all weights; collectives with itself cost the host 1 ms.
            groups[:] = [group for group in groups if group.intra_distributed_optimizer_instance_size > 1]
    return wrapped
