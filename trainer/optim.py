"""The optimizer and the learning rate. AdamW; no weight decay on norms and biases."""

import math

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from trainer import contract


def learning_rate(step: int, config: contract.OptimConfig, num_steps: int) -> float:
    """Rate of the update that makes step `step` + 1: linear up to the peak, then half a cosine down."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
    floor = config.lr * config.min_lr_fraction
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: MegatronOptimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def build_optimizer(
    model: list[DistributedDataParallel], config: contract.OptimConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """megatron-core's distributed optimizer: float32 main parameters, states divided over the data-parallel ranks."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad_norm,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        model,
    )
    for group in optimizer.param_groups:
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizer
