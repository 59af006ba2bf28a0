"""The optimizer, the learning rate and the gradient norms. AdamW; each part of the model has its own rate and decay."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch.optim.adamw import adamw

from trainer.checkpoint.hf_read import is_of_experts
from trainer.contract.run import OptimConfig, TrainConfig
from trainer.libraries.megatron_private import patch_clipping, patch_torch_adam
from trainer.libraries.torch_private import foreach_copy
from trainer.model.family import Family
from trainer.parallel.fsdp import FullyShardedModel
from trainer.parallel.mesh import Mesh

# The key of a parameter group that names its part. megatron-core matches a checkpoint's groups to the optimizer's only
# by four keys (`param_group_identifier_keys`: wd_mult, lr_mult, is_expert_parallel, is_decoupled_lr). If two groups had
# equal keys, one would be loaded into both. This one of the four keys is read nowhere else.
PART_KEY = "is_decoupled_lr"


MOMENTS = ("exp_avg", "exp_avg_sq")
PIECE = 2**28  # numbers: 2 GB of moments in float32 at a time


class PiecewiseAdam(torch.optim.AdamW):
    """torch's fused AdamW, whose moments may be bfloat16 between two updates. The arithmetic is float32.

    Transformer Engine's Adam can also keep bfloat16 moments. For an update it copies the moments of a whole group to
    float32, and to save or load it copies those of the whole model: this needs 8 bytes a parameter to save 4. Here an
    update goes through the parameters piece by piece. Both optimizers count updates by group, so that a checkpoint of
    either loads into the other.

    Args:
        groups: parameter groups of the optimizer that this one replaces; shared with it. "step" counts their updates.
        moments: dtype of the moments between two updates.
    """

    def __init__(self, groups: list[dict[str, Any]], moments: torch.dtype = torch.bfloat16) -> None:
        super().__init__([torch.empty(0)])
        self.param_groups, self.moments = groups, moments

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            held = [param for param in group["params"] if param.grad is not None]
            for param in held:
                state = self.state[param]
                for name in MOMENTS:
                    state.setdefault(name, torch.zeros_like(param, dtype=self.moments))
                state["step"] = torch.tensor(float(group["step"]))  # megatron-core reads it on a CPU
            for pieces in _bounded(held):
                self._update(group, pieces)

    def _update(self, group: dict[str, Any], pieces: list[tuple[torch.Tensor, slice]]) -> None:
        def taken(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor.view(-1)[part] for tensor, (_, part) in zip(tensors, pieces, strict=True)]

        params = [param for param, _ in pieces]
        stored = [taken(self.state[param][name] for param in params) for name in MOMENTS]
        moments = [[short.float() for short in shorts] for shorts in stored]
        before = float(group["step"] - 1)
        steps = list(torch.full((len(params),), before, device=params[0].device).unbind())
        beta1, beta2 = group["betas"]
        numbers = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        grads = taken(param.grad for param in params)
        adamw(
            *(taken(param.detach() for param in params), grads, *moments, [], steps),
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            **numbers,
        )
        if self.moments is not torch.float32:  # otherwise `moments` are the stored tensors, already updated in place
            for shorts, updated in zip(stored, moments, strict=True):
                foreach_copy(shorts, updated)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups' numbers with torch, and the moments directly, because torch would make them float32."""
        super().load_state_dict({**state_dict, "state": {}})
        params = [(param, group) for group in self.param_groups for param in group["params"]]
        for number, state in state_dict["state"].items():
            param, group = params[number]
            kept = {name: state[name].to(self.moments) for name in MOMENTS}
            self.state[param] = {"step": torch.tensor(float(group.get("step", 0))), **kept}


def _bounded(params: Iterable[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, slice]]]:
    """Yield lists of parts of parameters, as (parameter, slice of its flat view), with at most PIECE numbers a list."""
    pieces, room = [], PIECE
    for param in params:
        start = 0
        while start < param.numel():
            stop = min(param.numel(), start + room)
            pieces.append((param, slice(start, stop)))
            room -= stop - start
            start = stop
            if not room:
                yield pieces
                pieces, room = [], PIECE
    if pieces:
        yield pieces


def learning_rate(step: int, config: OptimConfig, num_steps: int, peak: float | None = None) -> float:
    """Return the rate of the update from `step` to `step` + 1: linear up to the peak, then half a cosine down.

    Args:
        peak: highest rate; None: `config.lr`.
    """
    peak = config.lr if peak is None else peak
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
    floor = peak * config.min_lr_fraction
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: ChainedOptimizer, step: int, config: OptimConfig, num_steps: int) -> float:
    """Set each group's rate at this step from the group's own peak, and return the rate with the peak `config.lr`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config, num_steps, group["max_lr"])
    return learning_rate(step, config, num_steps)


def build_optimizer(
    model: list[DistributedDataParallel], config: TrainConfig, dtype: torch.dtype, family: Family
) -> ChainedOptimizer:
    """Build megatron-core's optimizer. It is the distributed one (float32 main parameters, states divided over the
    data-parallel ranks) if the chunks' `ddp_config` asks for it, otherwise the plain one.

    Args:
        model: the chunks of this pipeline rank, with the interface of megatron-core's DDP. Frozen parts must be frozen
            before the chunks are wrapped.
    """
    optim = config.optim
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.adam_beta1,
            adam_beta2=optim.adam_beta2,
            adam_eps=optim.adam_eps,
            clip_grad=optim.clip_grad_norm,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_distributed_optimizer=model[0].ddp_config.use_distributed_optimizer,
        ),
        model,
        config_overrides=_groups(config, family, dtype),
    )
    is_cuda = torch.cuda.is_available()
    if is_cuda and not HAVE_TE:
        patch_clipping()
    if optim.moments == "bfloat16" or (is_cuda and not HAVE_TE):
        if is_cuda:  # on a CPU the runtime shim has already done it
            patch_torch_adam()
        for inner in optimizer.chained_optimizers:
            inner.optimizer = PiecewiseAdam(inner.optimizer.param_groups, getattr(torch, optim.moments))
    return optimizer


def _groups(config: TrainConfig, family: Family, dtype: torch.dtype) -> dict[ParamKey, ParamGroupOverride]:
    """Return two groups per trained part: the weights, and the norms and biases, which do not decay.

    Parameters of another dtype than the model's are a separate group. In a group with both dtypes, megatron-core 0.16.1
    updates the float32 parameters first, but finds each parameter's entry in a checkpoint by another order.
    """
    other = ParamWithNamePredicate(f"not {dtype}", lambda param, _: param.dtype is not dtype)
    groups = {ParamKey(with_name_predicate=other): {"has_other_dtype": True}}
    for part in family.parts:
        own = config.part(part)
        if own.frozen:
            continue
        for decays in (True, False):
            belongs = functools.partial(_belongs, part=part, part_of=family.part_of, decays=decays)
            key = ParamKey(with_name_predicate=ParamWithNamePredicate(f"{part}, decays={decays}", belongs))
            decay = config.optim.weight_decay if own.weight_decay is None else own.weight_decay
            groups[key] = {
                PART_KEY: part,
                "max_lr": config.optim.lr if own.lr is None else own.lr,
                "weight_decay": decay if decays else 0.0,
                "wd_mult": float(decays),
            }
    return groups


def _belongs(param: torch.nn.Parameter, name: str, *, part: str, part_of: Callable[[str], str], decays: bool) -> bool:
    is_norm_or_bias = param.dim() == 1 or name.endswith(".bias")
    # DDP holds the model as `module`.
    return part_of(name.removeprefix("module.")) == part and decays is not is_norm_or_bias


@torch.no_grad()
def grad_norms_by_part(optimizer: ChainedOptimizer, device: torch.device) -> dict[str, float]:
    """Return the gradient norm of each trained part over all ranks; a collective of one reduction.

    Call it when the gradients are final (reduced, divided by the loss tokens) and before `optimizer.step()`, which
    scales them in place if it clips. The optimizer's own norm uses the same gradients, so the squares of the parts'
    norms add up to the square of the whole norm.
    """
    optimizer.prepare_grads()  # step() calls it again: without a loss scaler it only takes views of the gradient buffer
    names = sorted({group[PART_KEY] for group in optimizer.param_groups})  # equal on all ranks: groups may be empty
    grads: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for inner in optimizer.chained_optimizers:
        part_of_grad = {id(p.grad): group[PART_KEY] for group in inner.param_groups for p in group["params"]}
        # Leave out gradients that another rank counts: tensor-parallel duplicates, a tied embedding's second copy.
        for grad in inner.get_main_grads_for_grad_norm():
            grads[part_of_grad[id(grad)]].append(grad)
    norms = [torch.nn.utils.get_total_norm(grads[name]).to(device, torch.float64) for name in names]
    squares = torch.stack(norms).square()
    dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
    return dict(zip(names, squares.sqrt().tolist(), strict=True))


@torch.no_grad()
def squared_param_norm(
    chunks: Sequence[DistributedDataParallel | FullyShardedModel], optimizer: ChainedOptimizer, mesh: Mesh
) -> torch.Tensor:
    """Return the squared norm of all parameters over all ranks, (1,) float64 on the device. Trained and frozen
    parameters count once each; a float8 base is left out. A collective that does not wait for the device."""
    device = mesh.device
    counted = [p for inner in optimizer.chained_optimizers for p in inner.get_parameters()]  # divided over the ranks
    if isinstance(chunks[0], FullyShardedModel):
        counted += [piece for piece in chunks[0].slices.values() if not piece.requires_grad]
    else:
        frozen = (p for chunk in chunks for p in chunk.module.parameters() if not p.requires_grad)
        for param in (p for p in frozen if p.is_floating_point()):
            copies = mesh.groups.expt_dp if is_of_experts(param) else mesh.groups.dp_cp
            counted += [param] * (copies.rank() == 0)
    # Leave out the copies that tensor-parallel ranks hold, and a tied embedding's second copy, as for gradients.
    counted = [p for p in counted if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)]
    square = torch.nn.utils.get_total_norm(counted).to(device, torch.float64).square().view(1)
    dist.all_reduce(square)
    return square
