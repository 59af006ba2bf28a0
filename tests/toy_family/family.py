"""The toy family in one object, without torch; and a directory for sys.path that registers it like an installed
package."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveInt

from trainer.contract.model_shape import DecoderShape, ModelShape
from trainer.families.config_keys import decoder_sizes, read_keys
from trainer.families.qwen3_vl import shape as qwen3_vl
from trainer.families.qwen3_vl.family import FAMILY as QWEN3_VL

MODEL_TYPE = "toy_gated_vl"


class ToyTextKeys(qwen3_vl.TextKeys):
    """The keys of text_config."""

    rotary_dim: PositiveInt = 8


class ToyKeys(qwen3_vl.Qwen3VLKeys):
    """The keys of config.json."""

    model_type: Literal["toy_gated_vl"]
    text_config: ToyTextKeys


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ToyDecoderShape(DecoderShape):
    """The shape of a decoder with two kinds of layers."""

    turned: int

    @property
    def rotary_dim(self) -> int:
        return self.turned

    def layer_parameters(self, number: int) -> int:
        gate = self.hidden_size * self.num_heads * self.head_dim if number % 2 else 0
        return DecoderShape.layer_parameters(self, number) + gate

    def layer_flops(self, number: int) -> tuple[int, int, int]:
        before, after, squared = DecoderShape.layer_flops(self, number)
        return before, after + (2 * self.hidden_size * self.num_heads * self.head_dim if number % 2 else 0), squared


def read_shape(config: Mapping[str, Any], path: Path | str = "config.json") -> ModelShape:
    """Return the sizes as Qwen3-VL has them, with `text_config.rotary_dim`."""
    keys = read_keys(ToyKeys, config, path)
    section, theta = qwen3_vl.mrope_of(keys.text_config, keys.text_config.rotary_dim, path)
    language = ToyDecoderShape(
        **decoder_sizes(keys.text_config, f"{path}: text_config."),
        rope_theta=theta,
        mrope_section=section,
        tie_word_embeddings=keys.tie_word_embeddings,
        turned=keys.text_config.rotary_dim,
    )
    return qwen3_vl.with_vision(language, keys, path)


FAMILY = dataclasses.replace(
    QWEN3_VL,
    model_type=MODEL_TYPE,
    read_shape=read_shape,
    model="tests.toy_family.model:ToyModel",
    rules="tests.toy_family.model:rules",
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
