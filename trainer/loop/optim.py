"""The optimizer, the learning rate, the update and the norms. AdamW; each part of the model has its own rate and decay.

megatron-core's optimizer holds the float32 main parameters and divides them over the data-parallel ranks. Its own step
is not called: it reads the gradient norm on the host before it clips, see `clip_and_update`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, ParamKey, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch.optim.adamw import adamw

from trainer.checkpoint.hf_weights import is_of_experts
from trainer.contract.run import OptimConfig, TrainConfig
from trainer.libraries.megatron_private import patch_torch_adam, shorten_copies
from trainer.libraries.torch_private import foreach_copy, foreach_multiply, foreach_norm
from trainer.model.family import Family
from trainer.parallel.fsdp import FullyShardedModel
from trainer.parallel.mesh import Mesh

# The key of a parameter group that names its part. megatron-core matches a checkpoint's groups to the optimizer's only
# by four keys (`param_group_identifier_keys`: wd_mult, lr_mult, is_expert_parallel, is_decoupled_lr). If two groups had
# equal keys, one would be loaded into both. This one of the four keys is read nowhere else.
PART_KEY = "is_decoupled_lr"

MOMENTS = ("exp_avg", "exp_avg_sq")
PIECE = 2**28  # numbers: 2 GB of moments in float32 at a time


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
            bf16=dtype is torch.bfloat16,  # keeps float32 main parameters; there is no loss scale
            use_distributed_optimizer=model[0].ddp_config.use_distributed_optimizer,
        ),
        model,
        config_overrides=_groups(config, family, dtype),
    )
    # If only experts are trained, megatron-core's optimizer of all other weights is a stub, which cannot be saved.
    optimizer = ChainedOptimizer([inner for inner in optimizer.chained_optimizers if not inner.is_stub_optimizer])
    is_cuda = torch.cuda.is_available()
    if optim.moments == "bfloat16" or (is_cuda and not HAVE_TE):
        # Without Transformer Engine, megatron-core takes torch's AdamW as it is, which is not fused.
        if is_cuda:  # on a CPU `prepare_runtime` has already done it
            patch_torch_adam()
        for inner in optimizer.chained_optimizers:
            inner.optimizer = PiecewiseAdam(inner.optimizer.param_groups, getattr(torch, optim.moments))
    for inner in optimizer.chained_optimizers:
        if isinstance(inner, DistributedOptimizer):
            shorten_copies(inner)
    return optimizer


def _groups(config: TrainConfig, family: Family, dtype: torch.dtype) -> dict[ParamKey, ParamGroupOverride]:
    """Return two groups per trained part: the weights, and the norms and biases, which do not decay."""
    # In a group with both dtypes, megatron-core 0.16.1 updates the float32 parameters first, but finds each parameter's
    # entry in a checkpoint by another order. So parameters of another dtype than the model's are a separate group.
    other = ParamWithNamePredicate(f"not {dtype}", lambda param, _: param.dtype is not dtype)
    groups = {ParamKey(with_name_predicate=other): {"has_other_dtype": True}}
    for part in family.parts:
        own = config.part(part)
        if own.frozen:
            continue
        for decays in (True, False):
            # A partial and not a closure, which would see the last values of the loop's variables.
            belongs = functools.partial(_belongs, part=part, part_of=family.part_of, decays=decays)
            key = ParamKey(with_name_predicate=ParamWithNamePredicate(f"{part}, decays={decays}", belongs))
            decay = config.optim.weight_decay if own.weight_decay is None else own.weight_decay
            groups[key] = {
                PART_KEY: part,
                "max_lr": config.optim.lr if own.lr is None else own.lr,
                "weight_decay": decay if decays else 0.0,
                # Not read for an update. It is one of the four keys by which a checkpoint's groups are matched, and
                # keeps the two groups of a part apart.
                "wd_mult": float(decays),
            }
    return groups


def _belongs(param: torch.nn.Parameter, name: str, *, part: str, part_of: Callable[[str], str], decays: bool) -> bool:
    is_norm_or_bias = param.dim() == 1 or name.endswith(".bias")
    # DDP holds the model as `module`.
    return part_of(name.removeprefix("module.")) == part and decays is not is_norm_or_bias


def learning_rate(step: int, config: OptimConfig, num_steps: int, peak: float | None = None) -> float:
    """Return the rate of the update from `step` to `step` + 1: linear up to the peak, by default `config.lr`, then half
    a cosine down."""
    # A function of the step in place of megatron-core's scheduler: it has no state to save or to reshard.
    peak = config.lr if peak is None else peak
    if step < config.warmup_steps:
        # step + 1: with a rate of 0, where megatron-core's scheduler begins, the first update would do nothing.
        return peak * (step + 1) / config.warmup_steps
    # The last update is the one from num_steps - 1, and has the smallest rate.
    progress = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
    floor = peak * config.min_lr_fraction
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: ChainedOptimizer, step: int, config: OptimConfig, num_steps: int) -> float:
    """Set each group's rate at this step from the group's own peak, and return the rate with the peak `config.lr`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, config, num_steps, group["max_lr"])
    return learning_rate(step, config, num_steps)


def trained_parts(optimizer: ChainedOptimizer) -> list[str]:
    """Return the names of the trained parts, equal on all ranks: groups may be empty."""
    return sorted({group[PART_KEY] for group in optimizer.param_groups})


@torch.no_grad()
def squared_grad_norms(optimizer: ChainedOptimizer, device: torch.device) -> torch.Tensor:
    """Return the squared norm of all gradients over all ranks, then that of each of the `trained_parts`: (1 + parts,)
    float64. A collective that waits for nothing.

    Call it when the gradients are final (reduced, divided by the loss tokens) and before they are clipped.
    """
    grads, parts = [], []
    for inner in optimizer.chained_optimizers:
        part_of_grad = {id(p.grad): group[PART_KEY] for group in inner.param_groups for p in group["params"]}
        # Leave out gradients that another rank counts: tensor-parallel duplicates, a tied embedding's second copy.
        held = inner.get_main_grads_for_grad_norm()
        grads += held
        parts += [part_of_grad[id(grad)] for grad in held]
    # Gradients are read once for all norms, so the squares of the parts add up to that of the whole.
    norms = torch.stack(foreach_norm(grads)) if grads else torch.zeros(0, device=device)
    whole = torch.linalg.vector_norm(norms).square()
    runs = [(part, len(list(run))) for part, run in itertools.groupby(parts)]
    pieces = norms.split([length for _, length in runs])
    squares = []
    for name in trained_parts(optimizer):
        own = [piece for (part, _), piece in zip(runs, pieces) if part == name]
        squares.append(torch.linalg.vector_norm(torch.cat(own or [norms[:0]])).double().square())
    squares, group = torch.stack(squares), optimizer.get_grad_stats_parallel_group()
    if group.size() > 1:
        dist.all_reduce(whole, group=group)
        dist.all_reduce(squares, group=group)
    return torch.cat([whole.double().view(1), squares])


@torch.no_grad()
def clip_and_update(optimizer: ChainedOptimizer, device: torch.device) -> torch.Tensor:
    """Clip the gradients, update the parameters and return `squared_grad_norms`, without waiting for the device."""
    optimizer.prepare_grads()
    squares = squared_grad_norms(optimizer, device)
    # megatron-core's `step` reads the norm on the host before it clips. Here the factor stays on the device, and is 1
    # if the norm is no larger than `clip_grad_norm`.
    factor = optimizer.config.clip_grad / (squares[0].sqrt() + 1e-6)
    factor = torch.where(factor < 1, factor, 1.0).float()
    grads = [param.grad for inner in optimizer.chained_optimizers for param in inner.get_parameters()]
    grads = [grad for grad in grads if grad is not None]
    if grads:
        foreach_multiply(grads, factor)
    optimizer.step_with_ready_grads()
    return squares


class ParamNorm:
    """The norm of all parameters of the chunks. Norms of frozen parameters are computed once."""

    def __init__(
        self, chunks: Sequence[DistributedDataParallel | FullyShardedModel], optimizer: ChainedOptimizer, mesh: Mesh
    ) -> None:
        self._optimizer, self._mesh, groups = optimizer, mesh, mesh.groups
        if isinstance(chunks[0], FullyShardedModel):
            frozen = [piece for piece in chunks[0].slices.values() if not piece.requires_grad]
        else:
            held = [p for chunk in chunks for p in chunk.module.parameters() if not p.requires_grad]
            first = {True: groups.expt_dp.rank() == 0, False: groups.dp_cp.rank() == 0}
            frozen = [p for p in held if p.is_floating_point() and first[is_of_experts(p)]]
        self._frozen = _norms(frozen, mesh.device)

    @torch.no_grad()
    def squared(self) -> torch.Tensor:
        """Return the squared norm over all ranks, (1,) float64 on the device. Trained and frozen parameters count once
        each; a float8 base is left out. A collective that waits for nothing."""
        trained = [p for inner in self._optimizer.chained_optimizers for p in inner.get_parameters()]
        norms = torch.cat([_norms(trained, self._mesh.device), self._frozen])  # trained ones are divided over the ranks
        square = torch.linalg.vector_norm(norms).double().square().view(1)
        if self._mesh.world_size > 1:
            dist.all_reduce(square)
        return square


@torch.no_grad()
def _norms(params: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the norms of parameters, (n,), without the copies that tensor-parallel ranks hold and without a tied
    embedding's second copy."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for param in params:
        if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param):
            by_dtype.setdefault(param.dtype, []).append(param)
    norms = [torch.stack(foreach_norm(params)) for params in by_dtype.values()]
    return torch.cat(norms) if norms else torch.zeros(0, device=device)


class PiecewiseAdam(torch.optim.AdamW):
    """torch's fused AdamW, whose moments may be bfloat16 between two updates. The arithmetic is float32.

    Transformer Engine's Adam can also keep bfloat16 moments. For an update it copies the moments of a whole group to
    float32, and to save or load it copies those of the whole model: this needs 8 bytes a parameter to save 4. Here an
    update goes through the parameters piece by piece.

    Args:
        groups: parameter groups of the optimizer that this one replaces; shared with it.
    """

    def __init__(self, groups: list[dict[str, Any]], moments: torch.dtype = torch.bfloat16) -> None:
        super().__init__([torch.empty(0)])
        self.param_groups, self.moments = groups, moments

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            # Updates are counted by group, as Transformer Engine's Adam does, so that a checkpoint of either loads into
            # the other.
            group["step"] = int(group.get("step", 0)) + 1
            count = torch.tensor(float(group["step"]))  # megatron-core reads it on a CPU
            held = [param for param in group["params"] if param.grad is not None]
            for param in held:
                state = self.state[param]
                for name in MOMENTS:
                    state.setdefault(name, torch.zeros_like(param, dtype=self.moments))
                state["step"] = count
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
