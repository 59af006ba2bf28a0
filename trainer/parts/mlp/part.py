"""The gated MLP, described without torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.model.layer import FeedForward
from trainer.model.rules import Rule


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMLP(FeedForward):
    """A gated MLP: down(activation(gate(x)) * up(x))."""

    spec = "trainer.parts.mlp.module:spec"
    role = "mlp"

    hidden_size: int
    intermediate_size: int
    activation: str  # name of the gate's activation in transformers

    @property
    def parameters(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def flops(self) -> int:
        return 2 * self.parameters

    def saved_activations(self, *, selective: bool) -> int:
        """Return the numbers of gate and up; their product is computed again."""
        return 2 * self.intermediate_size

    def divided_widths(self) -> dict[str, int]:
        return {"intermediate_size": self.intermediate_size}

    def transformer_settings(self) -> Mapping[str, Any]:
        return {
            "ffn_hidden_size": self.intermediate_size,
            "gated_linear_unit": True,
            "activation": self.activation,
        }

    def rules(self, ours: str, hf: str) -> Iterator[Rule]:
        ours, hf, role = f"{ours}mlp.", f"{hf}mlp.", self.role
        width, inner = self.hidden_size, self.intermediate_size
        gate_and_up = (hf + "gate_proj.weight", hf + "up_proj.weight")
        yield Rule(ours + "linear_fc1.weight", gate_and_up, sizes=((inner, width), (inner, width)), role=role)
        yield Rule(ours + "linear_fc2.weight", (hf + "down_proj.weight",), sizes=((width, inner),), role=role, axis=1)
