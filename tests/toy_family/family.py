"""The toy family in one object, without torch; and a directory for sys.path that registers it like an installed
package."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from trainer.families.config_keys import attention_of, decoder_shape, mlp_of, read_keys
from trainer.families.qwen3_vl import family as qwen3_vl
from trainer.model.layer import FeedForward, Layer, LayerFlops
from trainer.model.rules import Rule
from trainer.model.shape import ModelShape
from trainer.parts.attention.part import Attention

MODEL_TYPE = "toy_gated_vl"


class ToyTextKeys(qwen3_vl.TextKeys):
    """The keys of text_config."""

    rotary_dim: PositiveInt = 8
    num_blended: PositiveInt = 3


class ToyKeys(qwen3_vl.Qwen3VLKeys):
    """The keys of config.json."""

    model_type: Literal["toy_gated_vl"]
    text_config: ToyTextKeys


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GateAfterAttention(Attention):
    """Attention whose output is multiplied by a gate of the layer's normalised input."""

    spec = "tests.toy_family.model:gated_spec"

    @property
    def parameters(self) -> int:
        return Attention.parameters.fget(self) + self._gate

    @property
    def flops(self) -> LayerFlops:
        before, after, squared = Attention.flops.fget(self)
        return LayerFlops(before, after + 2 * self._gate, squared)

    def rules(self, ours: str, hf: str) -> Iterator[Rule]:
        yield from Attention.rules(self, ours, hf)
        heads = self.num_heads * self.head_dim
        name, sizes = f"{ours}self_attention.gate.weight", ((heads, self.hidden_size),)
        yield Rule(name, (f"{hf}self_attn.g_proj.weight",), sizes=sizes, role=self.role)

    @property
    def _gate(self) -> int:
        return self.hidden_size * self.num_heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlendedMLPs(FeedForward):
    """Gated MLPs that compute every token; a softmax of the token weights their outputs. No linear layer has adapters.

    On disk and in the model, each of the three matrices of all MLPs is one tensor.
    """

    spec = "tests.toy_family.model:blended_spec"
    role = "mlp"

    hidden_size: int
    intermediate_size: int
    count: int

    @property
    def parameters(self) -> int:
        return self.count * self.hidden_size * (3 * self.intermediate_size + 1)

    @property
    def flops(self) -> int:
        return 2 * self.parameters

    def saved_activations(self, *, selective: bool) -> int:
        return self.count * (3 * self.intermediate_size + self.hidden_size + 1)

    def divided_widths(self) -> dict[str, int]:
        return {"intermediate_size": self.intermediate_size}

    def rules(self, ours: str, hf: str) -> Iterator[Rule]:
        yield Rule(f"{ours}mlp.router", (f"{hf}mlp.gate.weight",))
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield Rule(f"{ours}mlp.{name}", (f"{hf}mlp.blend.{name}",))


def read_shape(config: Mapping[str, Any], path: Path | str = "config.json") -> ModelShape:
    """Return Qwen3-VL's sizes with `text_config.rotary_dim`. Odd layers have a gate, even layers blended MLPs."""
    keys = read_keys(ToyKeys, config, path)
    text, where = keys.text_config, f"{path}: text_config."
    section, theta = qwen3_vl.mrope_of(text, text.rotary_dim, path)
    attention = attention_of(text, where)
    sizes = {field.name: getattr(attention, field.name) for field in dataclasses.fields(attention)}
    mixers = (attention, GateAfterAttention(**sizes))
    mlp = mlp_of(text)
    blend = BlendedMLPs(hidden_size=mlp.hidden_size, intermediate_size=mlp.intermediate_size, count=text.num_blended)
    language = decoder_shape(
        text,
        where,
        layers=tuple(
            Layer(text.hidden_size, mixers[n % 2], (blend, mlp)[n % 2]) for n in range(text.num_hidden_layers)
        ),
        rope_theta=theta,
        rotary_dim=text.rotary_dim,
        mrope_section=section,
        tie_word_embeddings=keys.tie_word_embeddings,
    )
    return qwen3_vl.with_vision(language, keys, path)


FAMILY = dataclasses.replace(
    qwen3_vl.FAMILY,
    model_type=MODEL_TYPE,
    read_shape=read_shape,
    reference="tests.toy_family.reference:ToyForConditionalGeneration",
    embedded=None,
)


def write_distribution(directory: Path) -> Path:
    """Write the files that an installation of a package with this family leaves, into a directory for sys.path."""
    info = directory / "toy_family-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[athanor.families]\n{MODEL_TYPE} = tests.toy_family.family:FAMILY\n")
    return directory
