"""Experts behind a router, described without torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from dataset_builders.contracts.strict import StrictModel
from trainer.model.layer import FeedForward
from trainer.model.rules import STACKED, EitherWay, OneByOne, Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts(FeedForward):
    """Gated MLPs of which each token uses `top_k`, and optionally a gated MLP that every token uses."""

    spec = "trainer.parts.experts.module:spec"
    role = "mlp"
    routes_tokens = True

    hidden_size: int
    num_experts: int  # number of experts of the layer
    top_k: int  # number of experts of a token
    intermediate_size: int  # width of one expert
    activation: str  # name of the gates' activation in transformers
    shared_size: int = 0  # width of the shared expert, whose output is multiplied by a sigmoid gate; 0: there is none
    # whether files may store an expert's matrices as (in, out), as the published Qwen3-VL does
    may_be_transposed: bool = False

    @property
    def parameters(self) -> int:
        shared = 3 * self.hidden_size * self.shared_size + self.hidden_size * bool(self.shared_size)
        return self._router + self.expert_parameters + shared

    @property
    def expert_parameters(self) -> int:
        return self.num_experts * self._expert

    @property
    def inactive_parameters(self) -> int:
        return (self.num_experts - self.top_k) * self._expert

    @property
    def flops(self) -> int:
        """Forward FLOPs per token: router, chosen experts and shared expert."""
        return 2 * (self._router + self.top_k * self._expert + 3 * self.hidden_size * self.shared_size)

    @property
    def _router(self) -> int:
        return self.num_experts * self.hidden_size

    @property
    def _expert(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    def saved_activations(self, *, selective: bool) -> int:
        # The router keeps its probabilities in float32, which count twice. The shared expert keeps what a dense MLP
        # keeps.
        return self.expert_activations(selective=selective) + 2 * self.num_experts + 2 * self.shared_size

    def expert_activations(self, *, selective: bool) -> int:
        # The kernels of a GPU keep gate and up of each chosen expert, and compute its other numbers again.
        return 0 if selective else 2 * self.top_k * self.intermediate_size

    @property
    def transient_activations(self) -> int:
        """Values per token that exist only while the layer's backward runs: rows and gradients of chosen experts."""
        return self.top_k * (2 * self.hidden_size + 4 * self.intermediate_size)

    def divided_widths(self) -> dict[str, int]:
        return {"shared_expert_intermediate_size": self.shared_size} if self.shared_size else {}

    def expert_divided_widths(self) -> dict[str, int]:
        return {"num_experts": self.num_experts}

    def transformer_settings(self) -> Mapping[str, Any]:
        return {"gated_linear_unit": True, "activation": self.activation}

    def rules(self, ours: str, hf: str) -> Iterator[Rule]:
        ours, hf = f"{ours}mlp.", f"{hf}mlp."
        width, inner = self.hidden_size, self.intermediate_size
        yield Rule(ours + "router", (hf + "gate.weight",))
        experts, one_by_one = hf + "experts.", OneByOne(experts=self.num_experts)
        for name, matrix, own in (
            ("gate_up", (2 * inner, width), ("gate_proj", "up_proj")),
            ("down", (width, inner), ("down_proj",)),
        ):
            packing = EitherWay(matrix=matrix) if self.may_be_transposed else STACKED
            each = tuple(f"{experts}{number}.{part}.weight" for number in range(self.num_experts) for part in own)
            # Some directories have tensors for each expert in place of one for all.
            stored_by_expert = Rule(ours + name, each, one_by_one, group="ep")
            yield Rule(
                ours + name,
                (f"{experts}{name}_proj",),
                packing,
                sizes=(matrix,),
                matrices=self.num_experts,
                used=self.top_k,
                role="experts",
                group="ep",
                one_by_one=stored_by_expert,
            )
        if not self.shared_size:
            return
        inner, shared = self.shared_size, hf + "shared_expert."
        gate_and_up = (shared + "gate_proj.weight", shared + "up_proj.weight")
        sizes = ((inner, width), (inner, width))
        yield Rule(ours + "shared.linear_fc1.weight", gate_and_up, sizes=sizes, role=self.role)
        yield Rule(
            ours + "shared.linear_fc2.weight",
            (shared + "down_proj.weight",),
            sizes=((width, inner),),
            role=self.role,
            axis=1,
        )
        yield Rule(ours + "shared_gate", (hf + "shared_expert_gate.weight",))


def loads(counts: Mapping[int, list[float]]) -> dict[str, float]:
    """Return the metrics of the experts' loads.

    Args:
        counts: number of tokens of each expert, by layer.

    Returns:
        expert_load_max: tokens of the busiest expert per expert's mean, of the most uneven layer.
        expert_load: the same, as the mean of all layers.
        experts_idle: share of experts without a token.
    """
    uneven = [max(layer) * len(layer) / max(1.0, sum(layer)) for layer in counts.values()]
    idle = sum(layer.count(0.0) for layer in counts.values())
    return {
        "expert_load_max": max(uneven),
        "expert_load": sum(uneven) / len(uneven),
        "experts_idle": idle / sum(map(len, counts.values())),
    }


def mean_auxiliary_loss(sums: Mapping[int, list[float]]) -> dict[str, float]:
    """Return the auxiliary loss, given for each layer the sum of its auxiliary losses and their number."""
    values = [total / count for total, count in sums.values() if count]
    return {"auxiliary_loss": sum(values) / len(values)} if values else {}


# The sizes in a model with random weights.


class ExpertSizes(StrictModel):
    """The experts of a decoder's layers."""

    count: int = Field(gt=0, le=4096, description="experts of a layer")
    top_k: int = Field(gt=0, le=4096, description="experts of a token, at most count")
    width: int = Field(gt=0, le=2**18, description="width of an expert's gated MLP")
    shared_width: int = Field(default=0, ge=0, le=2**18, description="width of the shared expert; 0: there is none")
    dense_layers: tuple[int, ...] = Field(default=(), description="layers with an MLP in place of experts")

    @model_validator(mode="after")
    def _experts_suffice(self) -> "ExpertSizes":
        if self.top_k > self.count:
            raise ValueError(f"top_k={self.top_k} is more than count={self.count}")
        return self


class WithExperts(StrictModel):
    """The field of a family whose decoder has experts."""

    later_fields = ("experts",)

    experts: ExpertSizes | None = Field(default=None, description="experts; null: there are none")
