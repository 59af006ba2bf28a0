"""A frozen base in float8 on a GPU: the kernel's bits, the layers of each set, memory while a model is loaded."""

import gc

import pytest
import torch

from tests.helpers.bins import MIXED, make_samples
from tests.helpers.hardware import ON_CUDA, requires_gpus
from tests.helpers.single_rank import single_rank
from tests.trainer.layers.test_float8_base import SEQ_LEN, adapted
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.layers import float8_base
from trainer.layers.float8_base import pack, unpack
from trainer.parallel.meta_parameters import materialised, parameters_on_meta

pytestmark = pytest.mark.promise(
    "Adapters train in every layout as in one process, to 2e-6, also with dropout in recomputed layers and beside "
    "a base in float8, there to the bit as beside the rounded weights; the base keeps its bits."
)

WIDTHS = [1, 96, 4096, 5000]


@requires_gpus(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_gives_the_bits_of_plain_torch(width, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].repeat(40)[:width].repeat(3, 1)
    scale = torch.tensor([2.0**-100, 1.0, 2.0**90])
    bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
    found = unpack(codes.cuda(), scale.cuda(), dtype).cpu()
    assert torch.equal(found.view(bits), unpack(codes, scale, dtype).view(bits))


@requires_gpus(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packing_gives_the_bits_of_a_cpu(dtype):
    torch.manual_seed(0)
    weight = (torch.randn(512, 1024) * torch.exp(4 * torch.randn(512, 1))).to(dtype)
    for found, expected in zip(pack(weight.cuda()), pack(weight), strict=True):
        assert torch.equal(found.cpu(), expected)


@requires_gpus(1)
@pytest.mark.parametrize("modules", ON_CUDA)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("shape", ["first", "second"])
def test_layers_compute_with_the_rounded_weights(shape, kind, modules):
    """Losses are equal to the bit, and gradients up to the order of attention's sums. A weight is unpacked once
    forward and once backward."""
    results = []
    with single_rank() as mesh, pytest.MonkeyPatch.context() as patch:
        unpacked = []
        patch.setattr(float8_base, "unpack", lambda *args: unpacked.append(1) or unpack(*args))
        for is_packed in (True, False):
            model = adapted(shape, mesh, kind, is_packed=is_packed, dtype=torch.bfloat16, modules=modules)
            geometry = geometry_of(model.shape)
            batch = make_micro_batch(make_samples(MIXED, geometry, range(20, 300)), geometry, SEQ_LEN).to(mesh.device)
            unpacked.clear()
            losses = model.train()(batch)
            losses.sum().backward()
            grads = {name: param.grad for name, param in model.named_parameters() if param.requires_grad}
            results.append((losses.detach(), grads, len(unpacked)))
    (losses, grads, count), (expected, expected_grads, none) = results
    assert torch.equal(losses, expected)
    for name, grad in grads.items():
        assert (grad - expected_grads[name]).norm() <= 5e-3 * expected_grads[name].norm(), name
    products = 4 * model.shape.language.num_layers
    lengths = products if kind == "dora" else 0  # the row lengths of a DoRA layer are of its unpacked weight too
    assert 2 * products - 1 <= count - lengths <= 2 * products
    assert none == 0


@requires_gpus(1)
def test_a_model_on_its_way_takes_no_more_room_than_packed():
    """Parameters are made without memory, and each matrix is packed on the device: never two of them there unpacked."""
    width, count = 4096, 12
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with parameters_on_meta():
        layers = [torch.nn.Linear(width, width, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    assert all(param.is_meta for layer in layers for param in layer.parameters())
    for layer in layers:
        torch.nn.init.normal_(materialised(layer, "weight"))
        layer.config = type("Config", (), {"params_dtype": torch.bfloat16})
        float8_base.pack_layer(layer, torch.device("cuda"))
    one = width * width
    assert torch.cuda.memory_allocated() - before <= count * one * 1.01
    assert torch.cuda.max_memory_allocated() - before <= (count + 6) * one
    x = torch.randn(8, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = x
    for layer in layers:
        out = layer(out)
    assert torch.cuda.memory_allocated() - before <= (count + 1) * one
    out.sum().backward()
    assert x.grad is not None
