"""Adapters keep for backward exactly the bytes that the memory estimate counts."""

import functools
import itertools

import pytest
import torch

from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.helpers.tiny_model import tiny_hf_dir
from tests.trainer.layers.test_delta_memory import kept_bytes
from tests.trainer.model.test_targets import ALL, training
from trainer.layers.lora import add_adapters
from trainer.model.adapters import adapted_layers, adapter_sizes
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "`athanor plan` counts parameters, FLOPs and what adapters and delta layers keep exactly, and GPU memory "
    "within 8% of measured peaks."
)

TOKENS = 24


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("hf_dir", [tiny_hf_dir, hybrid_hf_dir])
def test_adapters_keep_what_the_estimate_counts(hf_dir, kind):
    """Beside a layer's input, which its own product would keep."""
    family, shape = read_model(hf_dir())
    train = training(*ALL, kind=kind)
    layers = adapted_layers(family.weight_rules(shape), train.adapter)
    with single_rank() as mesh:
        model = build_tiny(hf_dir(), mesh, dtype=torch.bfloat16)
        add_adapters(model, layers, train.adapter, seed=1)
        kept = dict.fromkeys(("language", *(part for part in family.parts if part != "language")), 0)
        for layer in layers:
            linear = model.get_submodule(layer.ours)
            own = {param.untyped_storage().data_ptr(): param.nbytes for param in linear.parameters()}
            inputs = torch.randn(TOKENS, 1, layer.rule.sizes[0][1], dtype=torch.bfloat16, requires_grad=True)
            with_input = kept_bytes(functools.partial(_output, linear, inputs), without=own)
            kept[family.part_of(layer.ours)] += with_input - inputs.nbytes
    sizes = adapter_sizes(train, family, shape)
    language = [("language", place) for place in sizes.language]
    counted = dict.fromkeys(kept, 0)
    for part, place in itertools.chain(language, sizes.vision.items()):
        counted[part] += 2 * round(place.products.on(1) + TOKENS * place.per_token.on(1))
    assert kept == counted


def _output(linear: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return linear(inputs)[0]
