"""The output layer's losses and gradients against plain cross entropy: every count of chunks, one rank and two, float32
and bfloat16, with a float32 buffer for the weight's gradient and without."""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.bins import MIXED, make_samples
from tests.helpers.reference import random_hf_dir
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.world import start_ranks
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.layers import vocabulary
from trainer.layers.vocabulary import OutputLayer, add_rows

WORDS, HIDDEN, CHUNK, SEQ_LEN = 50, 16, 8, 128
COUNTS = (0, 1, 8, 9, 29)
DTYPES = (torch.float32, torch.bfloat16)
CASES = list(itertools.product(COUNTS, DTYPES, (False, True)))
OUTPUTS = ("losses", "hidden", "weight")
# Two places of rounding of the same numbers.
ROUNDING = 1.2


def draw(count: int) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, labels, and a gradient for each loss, no two alike."""
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, HIDDEN, generator=generator).bfloat16()
    weight = torch.randn(WORDS, HIDDEN, generator=generator).bfloat16()
    return hidden, weight, torch.randint(WORDS, (count,), generator=generator), torch.randn(count, generator=generator)


def make_layer(group: dist.ProcessGroup, *, fuse: bool) -> OutputLayer:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    layer = OutputLayer(
        HIDDEN, WORDS, config=config, init_method=lambda _: None, bias=False, skip_weight_param_allocation=True,
        tp_group=group,
    )  # fmt: skip
    layer.fuse_wgrad_accumulation = fuse
    return layer


def ours(count: int, dtype: torch.dtype, fuse: bool, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """Losses and gradients; of the weight this rank's rows, from a buffer that held ones before, less these."""
    hidden, weight, labels, upstream = draw(count)
    hidden = hidden.to(dtype).requires_grad_()
    weight = torch.nn.Parameter(weight.to(dtype).chunk(group.size())[group.rank()].clone())
    if fuse:
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    losses = make_layer(group, fuse=fuse)(hidden, labels, weight)
    losses.backward(upstream)
    assert (weight.grad is None) is fuse
    grad = weight.main_grad - 1 if fuse else weight.grad
    return {"losses": losses.detach(), "hidden": hidden.grad, "weight": grad}


def plain(count: int, dtype: torch.dtype, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Return the textbook result; each rank's part of the hidden states' gradient is rounded."""
    hidden, weight, labels, upstream = draw(count)
    hidden, weight = (x.to(dtype).requires_grad_() for x in (hidden, weight))
    logits = torch.cat([hidden @ part.t() for part in weight.chunk(ranks)], dim=1)
    losses = F.cross_entropy(logits if dtype is torch.float64 else logits.float(), labels, reduction="none")
    losses.backward(upstream.to(losses.dtype))
    return {"losses": losses.detach(), "hidden": hidden.grad, "weight": weight.grad}


def assert_equal_but_for_rounding(
    found: dict[str, torch.Tensor], count: int, dtype: torch.dtype, ranks: int = 1
) -> None:
    """In float32 to its last digits; in bfloat16 no further from float64 than plain bfloat16 is."""
    truth, usual = plain(count, torch.float64), plain(count, dtype, ranks)
    assert found["losses"].dtype is torch.float32
    for name in OUTPUTS:
        assert found[name].shape == truth[name].shape
        if dtype is torch.float32:
            assert_close(found[name], truth[name].float(), atol=2e-5, rtol=1e-5)
        else:
            error, yardstick = ((x[name].double() - truth[name]).norm() for x in (found, usual))
            assert error <= ROUNDING * yardstick, name


def _rank(directory: str) -> None:
    """Write this rank's results. This file is a module that `start_ranks` runs in each of two processes."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    vocabulary.CHUNK = CHUNK
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    found = {repr(case): ours(*case, dist.group.WORLD) for case in CASES}
    torch.save(found, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Return the results of two tensor-parallel ranks, by case."""
    directory: Path = tmp_path_factory.mktemp("ranks")
    log = directory / "log.txt"
    ranks = start_ranks("tests.trainer.layers.test_output_loss", 2, directory, log=log)
    assert [rank.wait() for rank in ranks] == [0, 0], log.read_text()[-3000:]
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def mesh() -> Iterator:
    with single_rank() as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(vocabulary, "CHUNK", CHUNK)


@pytest.mark.parametrize(("count", "dtype", "fuse"), CASES)
def test_losses_and_gradients(count, dtype, fuse, mesh):
    assert_equal_but_for_rounding(ours(count, dtype, fuse, mesh.groups.tp), count, dtype)


@pytest.mark.full
@pytest.mark.parametrize(("count", "dtype", "fuse"), CASES)
def test_losses_and_gradients_on_two_ranks(count, dtype, fuse, two_ranks):
    first, second = (found[repr((count, dtype, fuse))] for found in two_ranks)
    assert torch.equal(first["losses"], second["losses"]) and torch.equal(first["hidden"], second["hidden"])
    whole = first | {"weight": torch.cat([first["weight"], second["weight"]])}
    assert_equal_but_for_rounding(whole, count, dtype, ranks=2)


class Recorder(TorchDispatchMode):
    """Sizes and dtypes of every tensor that is made, and how often logits are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = dict.fromkeys(DTYPES, 0)
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in self.largest:
                self.largest[tensor.dtype] = max(self.largest[tensor.dtype], tensor.numel())
        self.products += func is torch.ops.aten.mm.out and out.size(1) == WORDS
        return out


@pytest.mark.parametrize("fuse", [False, True])
def test_logits_of_all_loss_tokens_never_exist(fuse, mesh):
    count = 29
    with Recorder() as chunked:
        ours(count, torch.bfloat16, fuse, mesh.groups.tp)
    with Recorder() as whole:
        plain(count, torch.bfloat16)
    assert whole.largest[torch.float32] == whole.largest[torch.bfloat16] == count * WORDS
    assert max(chunked.largest.values()) <= max(CHUNK, HIDDEN) * WORDS < count * WORDS
    assert chunked.products == 4 + 3  # of four chunks one is kept


def test_up_to_a_chunk_nothing_is_computed_twice(mesh):
    with Recorder() as recorder:
        ours(CHUNK, torch.bfloat16, False, mesh.groups.tp)
    assert recorder.products == 1


def test_a_second_backward_finds_the_same(mesh):
    hidden, weight, labels, upstream = draw(20)
    hidden, weight = (x.float().requires_grad_() for x in (hidden, weight))
    losses = make_layer(mesh.groups.tp, fuse=False)(hidden, labels, weight)
    first, second = (torch.autograd.grad(losses, (hidden, weight), upstream, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("fuse", [False, True])
def test_what_is_frozen_gets_no_gradient(fuse, mesh):
    hidden, weight, labels, upstream = draw(20)
    weight = torch.nn.Parameter(weight.float(), requires_grad=False)
    weight.main_grad = torch.zeros_like(weight)
    for wanted in (True, False):
        states = hidden.float().requires_grad_(wanted)
        losses = make_layer(mesh.groups.tp, fuse=fuse)(states, labels, weight)
        assert losses.requires_grad is wanted
    losses = make_layer(mesh.groups.tp, fuse=fuse)(hidden.float().requires_grad_(), labels, weight)
    losses.backward(upstream)
    assert weight.grad is None and not weight.main_grad.any()


@pytest.mark.parametrize("shape", ["first", "second"])
def test_the_models_gradient_buffers_hold_the_same_either_way(shape, mesh):
    """Tied and untied: what output layer and embedding add by themselves, and what megatron-core's hook adds."""
    grads = []
    for fuse in (False, True):
        model = build_tiny(random_hf_dir(shape), mesh, SEQ_LEN)
        for module in (model.language.output_layer, model.language.embedding):
            module.fuse_wgrad_accumulation = fuse
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        chunk = DistributedDataParallel(model.config, config, model)
        samples = make_samples(MIXED, geometry_of(model.shape), range(20, 300))
        batch = make_micro_batch(samples, geometry_of(model.shape), SEQ_LEN)
        for _ in range(2):  # two micro batches into one buffer
            chunk(batch).sum().backward()
        grads.append({name: param.main_grad.clone() for name, param in model.named_parameters()})
    for name, grad in grads[0].items():
        scale = float(grad.norm())
        assert scale and float((grads[1][name] - grad).norm()) <= 1e-5 * scale, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [[5], [3, 0, 3, 7, 0, 3], [7, 6, 5, 4, 3, 2, 1, 0], [2] * 30])
def test_rows_of_an_embedding_get_the_bits_of_a_whole_gradient(tokens, dtype):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.tensor(tokens)
    grad = torch.randn(len(tokens), 4, generator=draw).to(dtype)
    buffer = torch.randn(8, 4, generator=draw)
    whole = buffer + torch.ops.aten.embedding_dense_backward(grad, tokens, len(buffer), -1, False)
    add_rows(buffer, tokens, grad)
    assert torch.equal(buffer, whole)


if __name__ == "__main__":
    _rank(sys.argv[1])
