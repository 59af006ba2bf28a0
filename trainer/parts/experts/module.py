"""Experts behind a router, as the second half of a layer, and their adapters.

The forward pass of a layer (`RoutedExperts.forward`): route the tokens and count the loads (routing.py), multiply by
the chosen experts (dispatch.py; kernels.py on a GPU), add a token's k outputs by their weights, and add the shared
expert's output if there is one.

s = tokens of this rank, after context and sequence parallelism; m = those that the rest of the model needs; D = hidden
size, E = experts, k = experts per token, I = width of an expert.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from trainer.contract.adapter import AdapterConfig
from trainer.contract.run import ExpertsConfig, TrainConfig
from trainer.layers.float8_base import hold_codes, pack
from trainer.layers.kernel_support import can_import, kernels_run
from trainer.layers.lora import Adapter, initial_a
from trainer.layers.measures import Reports
from trainer.layers.module_set import ACTIVATIONS
from trainer.layers.segments import RoutedTokens, SelectedRows
from trainer.layers.sharded_parameters import mark_sharded
from trainer.parallel.meta_parameters import copy_into
from trainer.parts.experts.dispatch import (
    ROW_MULTIPLE,
    Order,
    PackedProduct,
    TokensOfRanks,
    grouped_product,
    is_grouped,
)
from trainer.parts.experts.part import Experts
from trainer.parts.experts.routing import LoadPool, Routing, WithAuxiliaryLoss, route, tokens_of_experts
from trainer.parts.mlp.module import PackedMLP, mlp_submodules

if can_import():
    from trainer.parts.experts.kernels import Matrices, mixed_experts

_OF_EXPERTS = ("gate_up", "down")  # the parameters that hold a matrix for each expert
# Functions by name, because ranks exchange the names along with the sums (`Reports.metrics`).
_LOADS = "trainer.parts.experts.part:loads"
_LOSS = "trainer.parts.experts.part:mean_auxiliary_loss"


def spec(part: Experts, modules: BackendSpecProvider) -> ModuleSpec:
    """Return the spec of a decoder layer's experts."""
    shared = ExpertsSubmodules(mlp_submodules(modules))
    return ModuleSpec(module=RoutedExperts, params={"part": part}, submodules=shared)


@dataclass
class ExpertsSubmodules:
    """The linear layers of the shared expert."""

    shared: MLPSubmodules


class RoutedExperts(MegatronModule):
    """Experts behind a router. Expert-parallel ranks divide the experts; tensor-parallel ranks divide only the shared
    expert.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: ExpertsSubmodules,
        *,
        part: Experts,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.part, self.activation = part, ACTIVATIONS[part.activation]
        self.settings, self.layer, self.reports = ExpertsConfig(), 0, Reports()  # until `prepare_training`
        count, width, inner = part.num_experts, part.hidden_size, part.intermediate_size
        self.groups, self.adapter = pg_collection, torch.nn.ModuleDict()
        self.router = _weight(config, count, width)
        own = count // pg_collection.ep.size()
        self.gate_up = _weight_of_experts(config, own, 2 * inner, width)
        self.down = _weight_of_experts(config, own, width, inner)
        if part.shared_size:
            shared_config = dataclasses.replace(config, ffn_hidden_size=part.shared_size)
            self.shared = PackedMLP(shared_config, submodules.shared, pg_collection=pg_collection)
            self.shared_gate = _weight(config, 1, width)

    def prepare_training(self, train: TrainConfig, layer: int, reports: Reports) -> None:
        """Set how the router is trained, and where the loads are reported. `layer` counts from 0 over the whole
        model."""
        self.settings, self.layer, self.reports = train.experts, layer, reports
        reports.shared(LoadPool).layers.add(layer)

    def adapt(self, name: str, config: AdapterConfig) -> "ExpertsAdapter":
        """Add and return the adapters of a parameter of the experts."""
        self.adapter[name] = ExpertsAdapter(self.get_parameter(name), config, self.groups, self.config.params_dtype)
        return self.adapter[name]

    def pack(self, name: str, device: torch.device) -> None:
        """Hold a parameter of the experts as float8 on a device from now on; see `float8_base.pack_layer`."""
        whole = self.get_parameter(name)
        codes, scale = pack(whole.detach().to(device).flatten(0, 1))
        hold_codes(self, name, codes.view(whole.shape), f"{name}_scale", scale)

    def forward(self, hidden: torch.Tensor, rows: SelectedRows | None, tokens: RoutedTokens) -> torch.Tensor:
        """Map (s, 1, D) to (s, 1, D), or only to the chosen rows (m, 1, D)."""
        mine, divided = hidden if rows is None else rows.of_hidden(hidden), None
        if self.groups.ep.size() > 1:
            divided = TokensOfRanks(mine[:, 0], len(tokens.is_token), self.groups.ep)
        # All tokens are routed, so that loads and auxiliary loss cover them; padding is counted nowhere. The router
        # gets a gradient here if its choice weights the output (no chosen rows), or from the auxiliary loss.
        is_trained = torch.is_grad_enabled() and (rows is None or self.settings.coefficient > 0)
        routing = self._choose(hidden[:, 0]) if is_trained else self._choose(hidden[:, 0].detach())
        counts = tokens_of_experts(routing.chosen, tokens.is_token, self.part.num_experts)
        if self.training:
            self.reports.report(_LOADS, self.layer, counts)
        if rows is None:
            # Rows of padding have the weight 0. On ranks that divide the experts they belong to none. Otherwise they
            # are the last of the last expert, so that every row belongs to one, and the number of rows does not depend
            # on the tokens.
            of_padding = self.part.num_experts - (divided is None)
            chosen = routing.chosen.masked_fill(~tokens.is_token[:, None], of_padding)
            weights = routing.weights * tokens.is_token[:, None]
        else:
            # The last layer computes only the tokens with loss. They are routed again, because the choice above may
            # have no gradient.
            _, weights, chosen = self._choose(mine[:, 0])
        if divided is None:
            out = self._mix(mine[:, 0], weights, Order(chosen, self.part.num_experts))
        else:
            divided.begin_mix(weights, chosen, self.part.num_experts, self._mix)
        if self.part.shared_size:
            shared, _ = self.shared(mine)
            shared = (mine @ self.shared_gate.t()).sigmoid() * shared
        if divided is not None:
            out = divided.end_mix()
        out = out[:, None] + shared if self.part.shared_size else out[:, None]
        if self.training and self.settings.coefficient:
            return self._with_auxiliary_loss(out, routing.probabilities, counts, tokens)
        return out

    def _choose(self, hidden: torch.Tensor) -> Routing:
        """Route (s, D), or deal the tokens to the experts in turn if the settings force a balance."""
        routing = route(hidden, self.router, self.part.top_k)
        if not self.settings.force_balance:
            return routing
        # For measurements: token after token takes the next k experts in turn, whatever the router says.
        turns = torch.arange(routing.chosen.numel(), device=hidden.device) % self.part.num_experts
        chosen = turns.view_as(routing.chosen)
        weights = routing.probabilities.gather(1, chosen)
        return Routing(routing.probabilities, (weights / weights.sum(-1, keepdim=True)).to(hidden.dtype), chosen)

    def _with_auxiliary_loss(
        self, out: torch.Tensor, probabilities: torch.Tensor, counts: torch.Tensor, tokens: RoutedTokens
    ) -> torch.Tensor:
        """Return `out`, whose backward pass adds the gradient of the auxiliary loss to the probabilities."""
        experts, count = self.part.num_experts, max(1, tokens.num_tokens)
        mine = (probabilities.detach().double() * tokens.is_token[:, None]).sum(0)
        load_and_probability = tokens.summed(torch.stack([counts, mine])) / count
        # Weighted by the bin's loss tokens, because the sum of all losses is divided by those of the global batch.
        scale = self.settings.coefficient * tokens.num_loss_tokens * experts / count
        if self.settings.auxiliary_loss == "layer":
            top_k, load = self.part.top_k, load_and_probability[0]
            self._report_loss(load_and_probability / top_k**0.5)  # whose product of two is then divided by k
            return WithAuxiliaryLoss.apply(out, probabilities, tokens.is_token, scale / top_k, lambda: load)
        # The loads of later layers are not known yet. `pool.load` is called in the backward pass, when all are.
        pool = self.reports.shared(LoadPool)
        pool.put(tokens, self.layer, load_and_probability)
        if pool.is_complete:
            self._report_loss(pool.mean())
        return WithAuxiliaryLoss.apply(out, probabilities, tokens.is_token, scale / len(pool.layers), pool.load)

    def _report_loss(self, load_and_probability: torch.Tensor) -> None:
        loss = self.part.num_experts * load_and_probability.prod(0).sum()
        self.reports.report(_LOSS, self.layer, torch.stack([loss, torch.ones_like(loss)]))

    def _mix(self, hidden: torch.Tensor, weights: torch.Tensor, order: Order) -> torch.Tensor:
        """Return (s, D): the sum of each token's experts on this rank, by their weights (s, k)."""
        fits = self.part.activation == "silu" and is_grouped(hidden)  # the kernels compute silu alone
        if fits and kernels_run(hidden.device):
            keep_gates = self.config.recompute_granularity != "selective"
            return mixed_experts(hidden, weights, order, *map(self._matrices, _OF_EXPERTS), keep_gates=keep_gates)
        rows = order.dispatch(hidden)
        if self.groups.ep.size() > 1:
            total = int(order.ends[-1])  # waits for the device
            others = rows.new_zeros(len(rows) - total, rows.size(1))
            rows = torch.cat([self._compute(rows[:total], order.ends), others])
        else:
            rows = self._compute(rows, order.ends)
        return (order.collect(rows) * weights[..., None]).sum(1)  # (s, k, D) -> (s, D)

    def _compute(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Map rows (R, D), sorted by this rank's experts, to (R, D)."""
        gate, up = self._product(rows, "gate_up", ends).chunk(2, -1)
        return self._product(self.activation(gate) * up, "down", ends)

    def _product(self, rows: torch.Tensor, name: str, ends: torch.Tensor) -> torch.Tensor:
        """Return the products of the rows with a parameter's matrices and their adapters."""
        weight = self.get_parameter(name)
        if weight.dtype is torch.uint8:
            out = PackedProduct.apply(rows, weight, self.get_buffer(f"{name}_scale"), ends)
        else:
            out = grouped_product(rows, weight, ends)
        return out + self.adapter[name](rows, ends) if name in self.adapter else out

    def _matrices(self, name: str) -> "Matrices":
        """Return a parameter's matrices and their adapters, for the kernels."""
        base = self.get_parameter(name)
        scale = self.get_buffer(f"{name}_scale") if base.dtype is torch.uint8 else None
        if name not in self.adapter:
            return Matrices(base, scale)
        a, b = self.adapter[name].matrices()
        return Matrices(base, scale, a, b * self.adapter[name].scaling)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Extend megatron-core's method by the parameters that expert-parallel ranks divide."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, adapter in self.adapter.items():
            state |= adapter.sharded_state_dict(f"{prefix}adapter.{name}.", sharded_offsets, metadata)
        return state | make_sharded_tensors_for_checkpoint(
            {name: self.get_parameter(name) for name in _OF_EXPERTS},
            prefix,
            dict.fromkeys(_OF_EXPERTS, 0),
            sharded_offsets,
            tp_group=self.groups.ep,
            dp_cp_group=self.groups.expt_dp,
        )


class ExpertsAdapter(Adapter):
    """The adapters of a parameter that holds one matrix per expert; expert-parallel ranks divide both alike.

    They are those that PEFT computes for stacked matrices (0.21, ParamWrapper). E = experts of this rank, r = rank of
    the adapters, R = rows sorted by expert.

    Args:
        weight: (E, out, in).
    """

    def __init__(
        self, weight: torch.nn.Parameter, config: AdapterConfig, groups: ProcessGroupCollection, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.scaling, self.groups = config.scaling, groups
        (experts, out, width), like = weight.shape, {"dtype": dtype, "device": weight.device}
        self.a = torch.nn.Parameter(torch.empty(experts, config.rank, width, **like))
        self.b = torch.nn.Parameter(torch.zeros(experts, out, config.rank, **like))
        for param in (self.a, self.b):
            mark_of_experts(param)

    @torch.no_grad()
    def initialise(self, names: Sequence[str], seed: int) -> None:
        """Set A as PEFT does; B is zero already."""
        (name,), group = names, self.groups.ep
        whole = initial_a(name, seed, len(self.a) * group.size(), *self.a.shape[1:])
        copy_into(self.a, whole.chunk(group.size())[group.rank()])

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return what the adapters add to the products of rows (R, in): (R, out)."""
        a, b = self.matrices()
        return grouped_product(grouped_product(rows, a, ends) * self.scaling, b, ends)

    def matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A (E, r', in) and B (E, out, r'). If r is no multiple of ROW_MULTIPLE, zeros fill up to the next."""
        missing = -self.a.size(1) % ROW_MULTIPLE
        if not missing:  # padding by nothing copies too
            return self.a, self.b
        return F.pad(self.a, (0, 0, 0, missing)), F.pad(self.b, (0, missing))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        groups = {"tp_group": self.groups.ep, "dp_cp_group": self.groups.expt_dp}
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, dict.fromkeys(state, 0), sharded_offsets, **groups)


def _weight(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    """Return an unset parameter that every tensor-parallel rank has whole."""
    weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    # With sequence parallelism each of these ranks has the gradient of its own tokens; by the mark megatron-core sums
    # them.
    weight.sequence_parallel = config.sequence_parallel
    return weight


def _weight_of_experts(config: TransformerConfig, *shape: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
    mark_of_experts(weight)
    return weight


def mark_of_experts(weight: torch.nn.Parameter) -> None:
    """Mark a parameter whose first axis expert-parallel ranks divide."""
    # megatron-core then sums its gradient over the ranks that hold the same experts.
    weight.allreduce = False
    mark_sharded(weight, 0)
