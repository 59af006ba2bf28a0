"""The model and data of the training benches: random weights of published sizes and drawn bins, as `athanor rate`."""

from pathlib import Path
from typing import Any

import numpy as np

import stages.rate.random_model as ours
from stages.inputs.config import EmbeddedModelConfig
from stages.rate.drawn import (
    MAX_PATCHES_PER_TOKEN,
    PAD_MULTIPLE,
    Ids,
    Kind,
    Mix,
    draw_kind,
    drawing,
    write_drawn_bins,
)
from stages.rate.random_model import CONTROL_TOKENS, VARIANTS, is_tiny
from tests.bench.host import Host

# Names that the benches import from here.
__all__ = ["CONTROL_TOKENS", "MAX_PATCHES_PER_TOKEN", "PAD_MULTIPLE", "Mix", "draw_kind", "is_tiny"]

# Qwen3-VL's encoder, sized as in another project's vision-heavy test, with Qwen3-0.6B; see `draw_heavy`.
HEAVY = "vision_heavy"
_HEAVY_SIZES = {"num_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 8}
_HEAVY_SIZES |= {"vision_depth": 45, "vision_hidden_size": 1536, "vision_intermediate_size": 8960}
_HEAVY_SIZES |= {"vision_num_heads": 16, "deepstack_indexes": ()}
MODELS = [*VARIANTS, HEAVY]
VOCABULARY = range(1000, 150000)


def random_model(name: str) -> EmbeddedModelConfig:
    """Return a variant by its name, or `HEAVY`; "NAME:4" has four decoder layers."""
    if name == HEAVY:
        return EmbeddedModelConfig(seed=0, variant="qwen3_vl_2b", **_HEAVY_SIZES)
    return ours.random_model(name)


def image_token(name: str) -> int:
    """Return the image token's id in a variant, which is the last id."""
    return random_model(name).vocab_size - 1


def config_of(name: str) -> dict[str, Any]:
    """Return config.json of a variant."""
    return ours.config_of(random_model(name))


def write_model(directory: Path, name: str) -> None:
    """Write a directory of random weights; see `write_random_model`."""
    ours.write_random_model(directory, random_model(name))


def write_model_and_look(directory: Path, model: str) -> Host:
    """Call `write_model` and describe the machine, in one process."""
    write_model(directory, model)
    return Host.here()


def draw_heavy(rng: np.random.Generator) -> Kind:
    """Draw a sample of the vision-heavy mix: eight images of 768 x 768 pixels."""
    return Kind(int(rng.integers(40, 300)), 8 * ((1, 48, 48),), learnt=0.3)


def write_data(
    directory: Path,
    num_bins: int,
    seq_len: int,
    vocabulary: range = VOCABULARY,
    *,
    model: str = "qwen3_vl_2b",
    pad_multiple: int = PAD_MULTIPLE,
) -> Mix:
    """Write tokenized shards and full bins for a variant, and return the contents of the bins."""
    ids = Ids(image_token(model))
    vocabulary = range(1, ids.image_token_id - len(CONTROL_TOKENS)) if is_tiny(model) else vocabulary
    draw = draw_heavy if model == HEAVY else drawing(ids, is_tiny(model))
    return write_drawn_bins(directory, num_bins, seq_len, vocabulary, ids, draw, pad_multiple)
