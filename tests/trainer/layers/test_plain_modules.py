"""The plain modules of CUDA on a CPU, where they need no kernel: the numbers of the exact set, gradients in their
buffers, and the GPUs on which our kernels run."""

import fcntl
import os

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.bins import MIXED, make_samples
from tests.helpers.reference import random_hf_dir
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.parity.test_qwen3_5_vl import SEQ_LEN
from trainer.contract.modules import Host
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.layers import kernel_support
from trainer.layers.attention_cores import FlashAttention, TorchVarlenAttention
from trainer.layers.kernel_support import allow_kernels, hopper_kernels_run, kernels_run
from trainer.layers.modules import choice
from trainer.layers.modules.plain import PlainModules
from trainer.parallel.vision.main_grads import add_to_main_grad

GPU = torch.device("cuda", 0)


class WithoutFlash(PlainModules):
    """Attention by torch's plain functions: flash kernels need a GPU."""

    def core_attention(self, head_dim: int = 0, *, causal: bool = True) -> type:
        return TorchVarlenAttention


@pytest.fixture
def mesh():
    with single_rank() as mesh:
        yield mesh


@pytest.mark.parametrize("hf_dir", [random_hf_dir("first"), hybrid_hf_dir("first")], ids=["qwen3_vl", "qwen3_5"])
def test_losses_and_every_gradient_are_those_of_the_exact_set(hf_dir, mesh, monkeypatch):
    exact = build_tiny(hf_dir, mesh, SEQ_LEN)
    monkeypatch.setattr(choice, "host_of", lambda device: Host("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(choice, "PlainModules", WithoutFlash)
    plain = build_tiny(hf_dir, mesh, SEQ_LEN, modules="plain")
    layer = plain.language.decoder.layers[-1]
    assert type(layer.mlp.linear_fc1).__name__ == "PlainColumnLinear"
    geometry = geometry_of(exact.shape)
    batch = make_micro_batch(make_samples(MIXED, geometry, range(20, 300)), geometry, SEQ_LEN)
    losses = []
    for model in (exact, plain):
        losses.append(model(batch))
        losses[-1].sum().backward()
    assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)
    found, wanted = dict(plain.named_parameters()), dict(exact.named_parameters())
    assert found.keys() == wanted.keys()
    for name, param in found.items():
        assert float((param.grad - wanted[name].grad).norm()) <= 1e-5 * float(wanted[name].grad.norm()), name


def test_gradients_of_weights_are_added_to_their_buffers(mesh, monkeypatch):
    monkeypatch.setattr(choice, "host_of", lambda device: Host("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(choice, "PlainModules", WithoutFlash)
    model = build_tiny(random_hf_dir("first"), mesh, 128, modules="plain")
    linear = model.vision.blocks.layers[0].mlp.linear_fc1
    x = torch.randn(9, 1, linear.weight.size(1), requires_grad=True)
    out, bias = linear(x)
    assert bias is None
    out.square().sum().backward()
    wanted = [p.grad.clone() for p in (linear.weight, linear.bias, x)]
    linear.fuse_wgrad_accumulation = True
    for param in (linear.weight, linear.bias):
        param.grad, param.main_grad, param.grad_added_to_main_grad = None, torch.ones_like(param), False
    x.grad = None
    linear(x)[0].square().sum().backward()
    assert linear.weight.grad_added_to_main_grad and not linear.bias.grad_added_to_main_grad
    for param in (linear.weight, linear.bias):
        add_to_main_grad(param)
    for found, expected in zip((linear.weight.main_grad - 1, linear.bias.main_grad - 1, x.grad), wanted, strict=True):
        assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_product_that_returns_no_gradient_has_added_it_by_itself():
    """Transformer Engine's in a recomputed layer: it sees a detached weight, whose mark nobody reads."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight.detach()

        @staticmethod
        def backward(ctx, grad):
            weight.main_grad += grad
            return grad, None

    x, weight = torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones(3), False
    weight.register_post_accumulate_grad_hook(add_to_main_grad)
    Fused.apply(x, weight).sum().backward()
    assert weight.main_grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("capability", "ours", "hopper"), [((8, 0), False, False), ((8, 9), False, False), ((9, 0), True, True),
                                       ((10, 0), True, False)],
)  # fmt: skip
def test_our_kernels_run_from_their_capability_on(capability, ours, hopper, monkeypatch):
    monkeypatch.setattr(kernel_support, "_capability", lambda device: capability)
    monkeypatch.setattr(kernel_support, "_allowed", True)
    assert (kernels_run(GPU), hopper_kernels_run(GPU)) == (ours, hopper)
    assert not kernels_run(torch.device("cpu"))
    allow_kernels(False)
    assert not kernels_run(GPU) and not hopper_kernels_run(GPU)


def test_attention_is_flash_attention_4s_where_it_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("ATHANOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(choice, "resolve_name", lambda name: name)
    for wanted, capability, version, kind in (
        ("plain", (9, 0), "4.0.0b36", choice._FAST_ATTENTION),
        ("plain", (9, 0), "", FlashAttention),
        ("plain", (10, 0), "4.0.0b36", FlashAttention),
        ("portable", (9, 0), "4.0.0b36", FlashAttention),
    ):
        host = Host("NVIDIA X", capability, flash=version)
        monkeypatch.setattr(choice, "host_of", lambda device, host=host: host)
        assert choice.choose_modules(wanted, GPU).core_attention(64, causal=False) == kind


@pytest.mark.parametrize("trouble", ["", "no directory", "no locks"])
def test_flash_attention_4_keeps_kernels_where_it_can(trouble, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("not supported")

    if trouble == "no directory":
        (tmp_path / "cache").write_text("a file")
    if trouble == "no locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    environ = {"ATHANOR_CACHE_DIR": str(tmp_path / "cache")}
    monkeypatch.setattr(os, "environ", environ)
    host = Host("NVIDIA H200", (9, 0), flash="4.0.0b36")
    monkeypatch.setattr(choice, "host_of", lambda device: host)
    # What FlashAttention 4 reads when it is imported.
    seen = []
    monkeypatch.setattr(choice, "resolve_name", lambda name: seen.append(dict(environ)))
    choice.choose_modules("plain", GPU)
    enabled = seen[0].get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED")
    directory = seen[0].get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
    assert (enabled, directory) == ((None, None) if trouble else ("1", str(tmp_path / "cache" / "flash-attn-4")))


def test_the_choice_lets_kernels_run_or_not_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(kernel_support, "_allowed", True)
    monkeypatch.setattr(kernel_support, "_capability", lambda device: (9, 0))
    caplog.set_level("INFO")
    for wanted, host, runs in (
        ("portable", Host("NVIDIA H200", (9, 0)), False),
        ("plain", Host("NVIDIA H200", (9, 0)), True),
        ("auto", Host("NVIDIA A100", (8, 0)), False),
    ):
        monkeypatch.setattr(choice, "host_of", lambda device, host=host: host)
        chosen = choice.choose_modules(wanted, GPU)
        assert chosen.core_attention(64) is FlashAttention
        assert kernels_run(GPU) is runs
        assert f"modules: plain torch {'and' if runs else 'without'} our kernels, on {host.gpu}" in caplog.text
        caplog.clear()
