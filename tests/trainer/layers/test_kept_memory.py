"""Mixers and adapters keep for backward exactly the bytes that the memory estimate counts. The autograd functions of
the delta rule's kernels run here with launches that do nothing, so they save the tensors that they save on a GPU."""

import dataclasses
import importlib
import itertools
import sys
from collections.abc import Callable, Container
from itertools import accumulate
from unittest.mock import MagicMock

import pytest
import torch

from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_config, hybrid_hf_dir
from tests.helpers.tiny_model import tiny_hf_dir
from tests.trainer.model.test_targets import ALL, training
from trainer.data.packed_chunks import PackedChunks
from trainer.families.qwen3_5_vl.family import read_shape
from trainer.layers.lora import add_adapters
from trainer.layers.segments import PackedSegments
from trainer.model.adapters import adapted_layers, adapter_sizes
from trainer.model.registry import read_model
from trainer.parts.attention.module import GatedSelfAttention, RotarySelfAttention
from trainer.parts.delta.module import DeltaAttention
from trainer.parts.delta.rule import gated_delta_net

pytestmark = pytest.mark.promise(
    "`athanor plan` counts parameters, FLOPs and what adapters and delta layers keep exactly, and GPU memory "
    "within 8% of measured peaks."
)

PACKAGE = "trainer.parts.delta.rule"
# function -> its module
FUNCTIONS = {
    "convolve_heads": "convolution",
    "delta_gates": "gates",
    "gated_norm": "gates",
    "gated_delta_rule": "kernels",
}
SHAPE = read_shape(hybrid_config("third")).language
LENGTHS = [128, 64, 192]  # whole chunks: a chunk that is not full has gates for 64 tokens all the same


def take_kernel_path(monkeypatch) -> None:
    """From now on the delta net takes the kernel path on a CPU; its numbers are of memory that nobody has written."""
    for name in ("triton", "triton.language", "triton.tools", "triton.tools.tensor_descriptor"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    sys.modules["triton"].cdiv = lambda a, b: -(-a // b)
    sys.modules["triton"].next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    for function, module in FUNCTIONS.items():
        loaded = importlib.import_module(f"{PACKAGE}.{module}")
        monkeypatch.setattr(gated_delta_net, function, getattr(loaded, function), raising=False)
    monkeypatch.setattr(gated_delta_net, "kernels_fit", lambda mixed, heads: True)


@pytest.fixture(autouse=True)
def forget_kernels():
    """Modules that were loaded without Triton are loaded anew by the next test that wants them."""
    yield
    for name in FUNCTIONS.values():
        sys.modules.pop(f"{PACKAGE}.{name}", None)


def kept_bytes(run: Callable[[], torch.Tensor], without: Container[int] = ()) -> int:
    """Bytes of the storages that a forward pass saves, without those at some addresses."""
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (tensor, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert run().requires_grad
    return sum(size for address, (_, size) in kept.items() if address not in without)


def bin_of(repeats: int) -> tuple[int, PackedSegments]:
    """Tokens and segments of a bin."""
    bounds = [0, *accumulate(LENGTHS * repeats)]
    chunks = PackedChunks.of(bounds)
    return bounds[-1], PackedSegments.of(torch.tensor(bounds, dtype=torch.int32), max(LENGTHS), chunks=chunks)


@pytest.fixture
def layers():
    """The attentions of a delta layer and of a gated one, in bfloat16."""
    with single_rank() as mesh:
        decoder = build_tiny(hybrid_hf_dir("third"), mesh, dtype=torch.bfloat16).language.decoder
        yield decoder.layers[0].self_attention, decoder.layers[3].self_attention


@pytest.mark.parametrize("selective", [False, True])
def test_a_delta_layer_keeps_what_the_estimate_counts(selective, layers, monkeypatch):
    layer, _ = layers
    assert isinstance(layer, DeltaAttention)
    take_kernel_path(monkeypatch)
    monkeypatch.setattr(layer.config, "recompute_granularity", "selective" if selective else None)

    def kept(repeats: int) -> int:
        tokens, segments = bin_of(repeats)
        hidden = torch.randn(tokens, 1, SHAPE.hidden_size, dtype=torch.bfloat16, requires_grad=True)

        def run() -> torch.Tensor:
            return layer.linear_proj(layer.attend(*layer.prepare(hidden, None), segments))[0]

        return kept_bytes(run) - hidden.nbytes

    per_token = (kept(2) - kept(1)) / bin_of(1)[0]  # what does not grow with the tokens is the layer's parameters
    assert per_token == 2 * SHAPE.layers[0].mixer.saved_activations(selective=selective)


def test_a_gate_keeps_itself_and_the_output_that_it_multiplies(layers):
    _, layer = layers
    assert isinstance(layer, GatedSelfAttention)
    tokens, segments, part = *bin_of(1), SHAPE.layers[3].mixer
    query, key, value, gate = (
        torch.randn(tokens, heads, part.head_dim, dtype=torch.bfloat16, requires_grad=True)
        for heads in (part.num_heads, part.num_kv_heads, part.num_kv_heads, part.num_heads)
    )
    gated = kept_bytes(lambda: layer.linear_proj(layer.attend(query, key, value, gate, segments))[0])
    plain = kept_bytes(lambda: layer.linear_proj(RotarySelfAttention.attend(layer, query, key, value, segments))[0])
    without = dataclasses.replace(part, gated=False).saved_activations(selective=False)
    assert gated - plain == 2 * (part.saved_activations(selective=False) - without) * tokens


def test_what_a_delta_layer_keeps_is_asked_for_once(layers, monkeypatch):
    """Where the rule is computed again, torch gives each saved tensor a single time."""
    layer, _ = layers
    take_kernel_path(monkeypatch)
    monkeypatch.setattr(layer.config, "recompute_granularity", "selective")
    tokens, segments = bin_of(1)
    hidden = torch.randn(tokens, 1, SHAPE.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    layer.attend(*layer.prepare(hidden, None), segments).sum().backward()
    assert hidden.grad.shape == hidden.shape


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
            with_input = kept_bytes(lambda linear=linear, x=inputs: linear(x)[0], without=own)
            kept[family.part_of(layer.ours)] += with_input - inputs.nbytes
    sizes = adapter_sizes(train, family, shape)
    language = [("language", place) for place in sizes.language]
    counted = dict.fromkeys(kept, 0)
    for part, place in itertools.chain(language, sizes.vision.items()):
        counted[part] += 2 * round(place.products.on(1) + TOKENS * place.per_token.on(1))
    assert kept == counted
