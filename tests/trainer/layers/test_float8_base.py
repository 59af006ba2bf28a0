"""A frozen base in float8: what it rounds, that layers compute as ever with the rounded weights, and what they keep."""

import itertools
import weakref
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from dataset_builders.errors import InputError
from tests.helpers.bins import MIXED, make_samples
from tests.helpers.run_dir import model_dir, write_job
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiers import tiered
from tests.trainer.train_config import train_config
from trainer.checkpoint import hf_weights
from trainer.contract.adapter import AdapterConfig
from trainer.contract.parallel import ParallelConfig
from trainer.data.micro_batch import geometry_of, make_micro_batch
from trainer.layers import float8_base
from trainer.layers.float8_base import base_packer, pack, pack_layer, unpack
from trainer.layers.lora import add_adapters
from trainer.layers.recompute import recomputed
from trainer.loop.set_up import build_chunks
from trainer.model.adapters import adapted_layers
from trainer.model.registry import read_model
from trainer.model.rules import Rule
from trainer.plan.checks import check_training

pytestmark = pytest.mark.promise(
    "Adapters train in every layout as in one process, to 2e-6, also with dropout in recomputed layers and beside "
    "a base in float8, there to the bit as beside the rounded weights; the base keeps its bits."
)

SEQ_LEN = 128
CODES = torch.arange(256, dtype=torch.uint8)[None]
FAMILIES = ["first", "hybrid-first", "text-first"]


@pytest.fixture(scope="module")
def mesh():
    with single_rank() as mesh:
        yield mesh


def rounding(weight: torch.Tensor) -> float:
    """The norm of what packing changes, over the weight's."""
    return float((unpack(*pack(weight), torch.float32) - weight).norm() / weight.norm())


def test_the_rounding_is_that_of_three_bits_whatever_the_weights_are():
    torch.manual_seed(0)
    normal = torch.randn(256, 1024)
    channels = normal.clone()
    channels[:, ::256] *= 30
    rows = normal * torch.exp(3 * torch.randn(256, 1))
    heavy = torch.distributions.StudentT(3.0).sample((256, 1024))
    for weight in (normal, channels, rows, heavy):
        assert 0.025 < rounding(weight) < 0.028


def test_rows_that_are_zero_tiny_or_huge():
    weight = torch.tensor([[0.0, 0.0], [1e-30, -3e-30], [1e-38, 0.0], [3e38, 1e36], [448.0, -0.4375]])
    found = unpack(*pack(weight), torch.float32)
    assert torch.equal(found[0], weight[0]) and torch.equal(found[4], weight[4])
    for row in (1, 3):
        assert (found[row] - weight[row]).abs().max() <= weight[row].abs().max() / 16
    assert torch.equal(found[2], torch.zeros(2))  # below what the factors reach


def test_what_is_unpacked_is_a_bfloat16_number_in_every_precision():
    for exponent in (-100.0, -7.0, 0.0, 100.0):
        scale = torch.tensor([2.0**exponent])
        exact = CODES.view(torch.float8_e4m3fn).double() * 2.0**exponent
        for dtype in (torch.float32, torch.bfloat16):
            found = unpack(CODES, scale, dtype)
            assert found.dtype is dtype
            assert torch.equal(found.double().nan_to_num(), exact.nan_to_num())


def test_packing_again_changes_nothing():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(64, 96, dtype=dtype)
        once = unpack(*pack(weight), dtype)
        assert torch.equal(unpack(*pack(once), dtype), once)
        assert torch.equal(pack(weight.float())[0], pack(weight)[0])


def test_ranks_that_divide_a_row_pack_it_as_one_would(monkeypatch):
    """Else what one rank can just tell from zero would be zero on another."""
    torch.manual_seed(0)
    weight = torch.randn(16, 64) * torch.tensor([1.0, 2.0**-14]).repeat_interleave(32)
    parts = weight.chunk(2, 1)
    largest = weight.abs().amax(1)
    monkeypatch.setattr(float8_base.dist, "all_reduce", lambda own, op, group: own.copy_(largest))
    codes, scale = pack(weight)
    for part, expected in zip(parts, codes.chunk(2, 1), strict=True):
        found, own_scale = pack(part, SimpleNamespace(size=lambda: 2))
        assert torch.equal(found, expected) and torch.equal(own_scale, scale)
    assert not torch.equal(pack(parts[1])[0], codes.chunk(2, 1)[1])


def linears(rules: Sequence[Rule]) -> set[str]:
    """Our names of the weights of linear layers."""
    return {rule.ours for rule in rules if rule.sizes}


def adapted(shape: str, mesh, kind: str, *, is_packed: bool, **build: object) -> torch.nn.Module:
    """A model with adapters, whose base is packed, or holds the numbers that packing gives."""
    family, read = read_model(model_dir(shape))
    model = build_tiny(model_dir(shape), mesh, SEQ_LEN, **build)
    rules = family.weight_rules(read)
    config = AdapterConfig(kind=kind, rank=4, alpha=8)
    if is_packed:
        packer = base_packer(model, mesh.device, linears(rules))
        for rule in rules:
            packer(rule.ours)
    else:
        for name, param in model.named_parameters():
            if name in linears(rules) and name.startswith("language."):
                param.data = unpack(*pack(param.data), param.dtype)
    add_adapters(model, adapted_layers(rules, config), config, seed=3)
    torch.manual_seed(1)
    for name, param in model.named_parameters():
        if ".adapter.b." in name:
            param.data.normal_(0, 0.05)
    return model


def losses_and_gradients(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    geometry = geometry_of(model.shape)
    samples = make_samples(MIXED if geometry.image_token_id else [], geometry, range(20, 300))
    batch = make_micro_batch(samples, geometry, SEQ_LEN)
    losses = model(batch)
    losses.sum().backward()
    return losses.detach(), {name: param.grad for name, param in model.named_parameters() if param.requires_grad}


@pytest.mark.parametrize(
    ("shape", "kind", "recompute"),
    tiered(
        itertools.product(["first", "hybrid-first"], ["lora", "dora"], [False, True]),
        (("first", "lora", False), ("hybrid-first", "dora", True)),
    ),
)
def test_layers_compute_as_ever_with_the_rounded_weights(shape, kind, recompute, mesh):
    results = []
    for is_packed in (True, False):
        model = adapted(shape, mesh, kind, is_packed=is_packed)
        model.language.decoder.recompute = recompute
        results.append(losses_and_gradients(model.train()))
    (losses, grads), (expected, expected_grads) = results
    assert torch.equal(losses, expected)
    assert grads.keys() == expected_grads.keys() and len(grads) > 8
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name]), name


@pytest.mark.parametrize("shape", FAMILIES)
def test_all_matrices_of_language_layers_are_packed_and_nothing_else(shape, mesh):
    model = build_tiny(model_dir(shape), mesh, SEQ_LEN)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    family, read = read_model(model_dir(shape))
    packed = linears(family.weight_rules(read)) - {"language.decoder.layers.1.mlp.linear_fc2.weight"}
    packer = base_packer(model, mesh.device, packed)
    for rule in family.weight_rules(read):
        packer(rule.ours)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    packed = {name for name, param in after.items() if param.dtype is torch.uint8}
    matrices = {name for name in before if before[name].dim() == 2 and name.startswith("language.decoder.layers.")}
    assert packed == matrices - {"language.decoder.layers.1.mlp.linear_fc2.weight"}
    assert all(not after[name].requires_grad for name in packed)
    for name in before.keys() - packed:
        assert torch.equal(after[name], before[name])


@pytest.mark.parametrize("shape", FAMILIES)
def test_one_matrix_is_there_unpacked_while_a_base_is_loaded(shape, mesh, monkeypatch, tmp_path):
    """Record the sizes of all tensors that become parameters or are read."""
    run = write_job(tmp_path, num_steps=3, shape=shape)
    adapter = AdapterConfig(rank=4, alpha=8, base="float8")
    run = run.model_copy(update={"train": run.train.model_copy(update={"adapter": adapter})})
    made, read, alive = [], [], []
    materialised, read_part = hf_weights.materialised, hf_weights.read_part

    def making(*args):
        param = materialised(*args)
        made.append(StorageWeakRef(param.untyped_storage()))
        return param

    def reading(*args):
        part = read_part(*args)
        read.append(StorageWeakRef(part.untyped_storage()))
        alive.append(sum(not storage.expired() for storage in read))
        return part

    monkeypatch.setattr(hf_weights, "materialised", making)
    monkeypatch.setattr(hf_weights, "read_part", reading)
    family, sizes = read_model(run.hf_dir)
    (model,) = build_chunks(run, family, sizes, mesh, torch.float32)
    packed = [param for param in model.parameters() if param.dtype is torch.uint8]
    kept = sum(not storage.expired() for storage in made)
    assert len(packed) > 8 and kept == len(made) - len(packed)
    assert set(alive) == {1}


def test_a_weight_is_unpacked_for_one_product_at_a_time(mesh, monkeypatch):
    model = adapted("first", mesh, "lora", is_packed=True).train()
    unpacked, alive = [], []

    def counting(*args):
        weight = unpack(*args)
        unpacked.append(StorageWeakRef(weight.untyped_storage()))
        alive.append(sum(not storage.expired() for storage in unpacked))
        return weight

    monkeypatch.setattr(float8_base, "unpack", counting)
    losses_and_gradients(model)
    # Forward and backward; nothing before the first product is trained.
    assert len(unpacked) == 2 * 4 * len(model.language.decoder.layers) - 1
    assert set(alive) == {1}


class _Product(torch.autograd.Function):
    """Keeps the weight twice, as Transformer Engine's products do, and a reference that nothing reads, as one does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight, weight.t())
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        weight, turned = ctx.saved_tensors
        assert torch.equal(weight.t(), turned) and weight.data_ptr() == turned.data_ptr()
        return grad @ weight, None


class _Linear(torch.nn.Linear):
    tp_group, config = None, SimpleNamespace(params_dtype=torch.float32)

    def forward(self, x):
        assert all(param.dtype is x.dtype for param in self.parameters())  # as Transformer Engine does at first
        self.activation = weakref.ref(exp := x.exp())
        return _Product.apply(exp * x, self.weight)


def test_a_weight_that_is_kept_twice_is_unpacked_once(monkeypatch):
    linear = _Linear(8, 4, bias=False)
    pack_layer(linear, torch.device("cpu"))
    calls = []
    monkeypatch.setattr(float8_base, "unpack", lambda *args: calls.append(1) or unpack(*args))
    x = torch.randn(3, 8, requires_grad=True)
    out = linear(x)
    assert out.grad_fn.weight.untyped_storage().size() == 0
    out.sum().backward()
    assert len(calls) == 2
    weight = linear.weight
    expected = torch.randn(3, 8, requires_grad=True)
    expected.data.copy_(x.data)
    F.linear(expected.exp() * expected, weight).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad, rtol=1e-6, atol=1e-6)


def test_what_is_recomputed_is_not_kept():
    linear = _Linear(8, 4, bias=False)
    pack_layer(linear, torch.device("cpu"))
    x = torch.randn(3, 8, requires_grad=True)
    out = linear(x)
    assert linear.activation() is not None, "the product's other factor is kept for its gradient"
    kept = recomputed(linear, x)
    assert linear.activation() is None
    grads = [torch.autograd.grad(y.sum(), x)[0] for y in (out, kept)]
    assert torch.equal(*grads)


@pytest.mark.parametrize(
    ("precision", "parallel", "words"),
    [
        ("bfloat16", {"sharding": "fsdp"}, ("execution.parallel.sharding is fsdp", "sharding=distributed_optimizer")),
        ("float8", {}, ("train.precision is float8", "train.precision=bfloat16")),
    ],
)
def test_what_does_not_go_with_it_is_refused(precision, parallel, words):
    family, _ = read_model(model_dir("first"))
    train = train_config(precision="bfloat16", adapter=AdapterConfig(rank=4, alpha=8, base="float8"))
    with pytest.raises(InputError) as refused:
        check_training(train.model_copy(update={"precision": precision}), ParallelConfig(**parallel), family)
    text = str(refused.value)
    assert all(word in text for word in (*words, "train.adapter.base is float8", "train.adapter.base=train_precision"))
    assert "\n" not in text
    check_training(train, ParallelConfig(), family)
