"""The kernels of the output layer's losses against float64, alone and in the layer, on one GPU."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.helpers.hardware import requires_gpus
from tests.helpers.single_rank import single_rank
from trainer.layers import vocabulary
from trainer.layers.vocabulary import OutputLayer

pytestmark = pytest.mark.promise(
    "Kernels on a GPU give plain torch's numbers but for rounding; layers in CUDA graphs give the bits of "
    "single launches."
)

# rows, words: Qwen3-VL's vocabulary whole and over two and eight ranks, and odd ones
SHAPES = [(64, 151_936), (300, 75_968), (33, 18_992), (7, 4_097), (1, 5)]


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape)))


@requires_gpus(1)
@pytest.mark.parametrize(("rows", "words"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_float64(rows, words, dtype):
    from trainer.layers.kernels import differentiate_logits, summarize_logits

    logits = draw(rows, words, scale=5).to(dtype)
    places = torch.randint(-words, 2 * words, (rows,), device="cuda")  # a third of the labels is this rank's
    places[0] = words - 1
    upstream, exact = draw(rows), logits.double()
    here = (places >= 0) & (places < words)
    safe = places.clamp(0, words - 1)
    out = torch.empty(3, rows, device="cuda")
    summarize_logits(logits, places, out)
    largest = exact.amax(1)
    total = (exact - largest[:, None]).exp().sum(1)
    assert torch.equal(out[0].double(), largest)
    assert (out[1] / total - 1).abs().amax() <= 1e-5
    assert torch.equal(out[2].double(), exact.gather(1, safe[:, None])[:, 0].where(here, 0.0))

    grad = (exact - largest[:, None]).exp() / total[:, None]
    grad[torch.arange(rows, device="cuda"), safe] -= here.double()
    grad *= upstream.double()[:, None]
    differentiate_logits(logits, places, out[0], out[1], upstream)
    # bfloat16 rounds by 2e-3 of a value on average
    assert (logits.double() - grad).norm() <= (4e-3 if dtype is torch.bfloat16 else 1e-5) * grad.norm()


@requires_gpus(1)
@pytest.mark.parametrize("count", [0, 1, 1000, 2500])
def test_the_layer_in_chunks_waits_for_nothing_and_adds_to_its_buffer(count, monkeypatch):
    monkeypatch.setattr(vocabulary, "CHUNK", 1024)
    words, size = 15_200, 256
    hidden = draw(count, size).bfloat16().requires_grad_()
    weight = torch.nn.Parameter(draw(words, size, scale=0.1).bfloat16())
    labels = torch.randint(words, (count,), device="cuda")
    upstream = draw(count)
    config = TransformerConfig(num_layers=1, hidden_size=size, num_attention_heads=1, perform_initialization=False)
    with single_rank() as mesh:
        options = {"bias": False, "skip_weight_param_allocation": True, "tp_group": mesh.groups.tp}
        layer = OutputLayer(size, words, config=config, init_method=lambda _: None, **options)
        results = []
        for number, fuse in enumerate((False, True, False, True)):
            layer.fuse_wgrad_accumulation = fuse
            hidden.grad = weight.grad = None
            weight.main_grad = torch.ones(words, size, device="cuda")
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if number >= 2 else "default")  # the first ones compile and plan
            try:
                losses = layer(hidden, labels, weight)
                losses.backward(upstream)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert (weight.grad is None) is fuse
            results.append((losses.detach(), hidden.grad, weight.main_grad - 1 if fuse else weight.grad))
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = F.cross_entropy(exact_hidden @ exact_weight.t(), labels, reduction="none")
    exact.backward(upstream.double())
    for found in results:
        for mine, true in zip(found, (exact.detach(), exact_hidden.grad, exact_weight.grad), strict=True):
            assert mine.shape == true.shape
            assert (mine.double() - true).norm() <= 1e-2 * true.norm()  # logits and their gradient rounded to bfloat16
