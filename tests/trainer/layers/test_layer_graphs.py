"""The pieces of a decoder's layers, run one after the other, are its layers; when they become CUDA graphs.

That their graphs give the same bits is shown on GPUs: tests/equivalence/test_layer_graphs_gpu.py.
"""

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch

from tests.helpers.run_dir import changed, make_bins, write_job
from tests.helpers.single_rank import single_rank
from tests.helpers.tiers import tiered
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.parity import test_experts, test_qwen3_5_vl, test_qwen3_vl
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import ExpertsConfig
from trainer.layers import cuda_graphs as layer_graphs
from trainer.layers.attention_cores import TorchVarlenAttention
from trainer.layers.cuda_graphs import GraphSection, Slot, divide_into_sections
from trainer.layers.segments import ResultBuffers, Rotation, joined
from trainer.loop import train as loop
from trainer.parts.attention import module as attention
from trainer.parts.delta import module as delta
from trainer.parts.delta.module import DeltaAttention, SplitRows

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


SHAPES = ("first", "second", "hybrid-second", "experts-listed", "experts-shared")


@pytest.fixture(scope="module", params=tiered(SHAPES, ("hybrid-second", "experts-shared")))
def pair(request):
    kind, _, shape = request.param.rpartition("-")
    with single_rank() as mesh:
        if kind == "experts":
            yield test_experts.Pair(experts_hf_dir(shape), mesh)
        else:
            yield {"hybrid": test_qwen3_5_vl}.get(kind, test_qwen3_vl).Pair(shape, mesh)


def used_in_attention(layer) -> list[torch.nn.Parameter]:
    """Those of a delta layer's rule, which is no part of a graph."""
    if not isinstance(layer.self_attention, DeltaAttention):
        return []
    delta = layer.self_attention
    return [delta.conv_weight, *delta.decay.parameters(), delta.norm_weight]


def numbers(pieces) -> list[tuple[int | None, int | None]]:
    return [(piece.after and piece.after.layer_number, piece.before and piece.before.layer_number) for piece in pieces]


def test_pieces_lie_between_attentions():
    layers = [MagicMock(layer_number=number) for number in (1, 2, 3, 4)]
    rotation = Rotation(*torch.zeros(2, 1, 1))
    joined = [(None, 1), (1, 2), (2, 3), (3, 4)]
    assert numbers(divide_into_sections(layers, 0, rotation)) == joined
    cut = [(None, 1), (1, None), (None, 2), (2, 3), (3, 4)]
    assert numbers(divide_into_sections(layers, 1, rotation)) == cut
    assert numbers(divide_into_sections(layers[:1], 0, rotation)) == [(None, 1)]


def test_every_parameter_before_the_last_attention_belongs_to_one_piece(pair):
    layers = list(pair.ours.language.decoder.layers)
    last = layers[-1]
    after = {id(p) for m in (last.self_attention.linear_proj, last.pre_mlp_layernorm, last.mlp) for p in m.parameters()}
    pieces = divide_into_sections(layers, 1, Rotation(*torch.zeros(2, 1, 1)))
    found = [id(param) for piece in pieces for param in piece.trained]
    after |= {id(param) for layer in layers for param in used_in_attention(layer)}
    assert sorted(found) == sorted({id(param) for layer in layers for param in layer.parameters()} - after)


@contextlib.contextmanager
def in_pieces(model, num_slots: int = 1, num_interrupted: int | None = None):
    """Call each piece in place of its graph."""
    decoder = model.language.decoder
    num_interrupted = model.shape.num_deepstack if num_interrupted is None else num_interrupted
    with (
        patch.object(Slot, "capture"),
        patch.object(layer_graphs, "_substitute_parameters", lambda _: contextlib.nullcontext()),
    ):
        decoder.capture(model.seq_len, model.shape.language.rotary_dim // 2, num_interrupted, num_slots)
    try:
        yield decoder.graphs
    finally:
        decoder.graphs = None


def test_the_caller_intervenes_after_the_last_layer_of_a_pipeline_rank(pair, monkeypatch):
    monkeypatch.setattr(layer_graphs, "_Replay", SimpleNamespace(apply=lambda piece, *inputs: piece.run(*inputs)))
    model, decoder = pair.ours, pair.ours.language.decoder
    hidden = torch.randn(model.seq_len, 1, decoder.config.hidden_size)
    given = (hidden, model.rotation(pair.batch), model._segments(pair.batch), lambda level, x: x * (level + 2), None)
    wanted = decoder(*given)
    with in_pieces(model, num_interrupted=len(decoder.layers)):
        assert torch.equal(decoder(*given), wanted)


def test_the_pieces_make_what_the_layers_make_with_a_slot_for_each_micro_batch(pair, monkeypatch):
    """A slot keeps what it holds for its micro batch until that micro batch's backward pass."""
    used = []
    monkeypatch.setattr(
        layer_graphs, "_Replay", SimpleNamespace(apply=lambda piece, *x: (used.append(piece), piece.run(*x))[1])
    )
    model = pair.ours
    plain = model(pair.batch)
    wanted = torch.autograd.grad(plain.sum(), list(model.parameters()))
    other = dataclasses.replace(pair.batch, position_ids=pair.batch.position_ids * 0)
    with in_pieces(model, num_slots=2) as graphs:
        first = model(pair.batch)
        assert torch.equal(first, plain)
        model(other)
        found = torch.autograd.grad(first.sum(), list(model.parameters()))
        model(other)
    pieces = [slot.sections for slot in graphs.slots]
    assert used == [*pieces[0], *pieces[1], *pieces[0]]
    for (name, _), a, b in zip(model.named_parameters(), found, wanted, strict=True):
        assert torch.equal(a, b), name


class InFixedMemory(torch.autograd.Function):
    """A replayed graph as on a GPU: it reads and writes the tensors of its capture."""

    @staticmethod
    def forward(ctx, piece, *inputs):
        layer_graphs._put(piece.inputs, inputs)
        with torch.enable_grad():
            ctx.piece, ctx.inputs = piece, [x.detach().requires_grad_() for x in piece.inputs]
            ctx.outputs = piece.run(*ctx.inputs)
        layer_graphs._put(piece.outputs, ctx.outputs)
        return tuple(x.detach() for x in piece.outputs)

    @staticmethod
    def backward(ctx, *grads):
        piece = ctx.piece
        layer_graphs._put(piece.grad_outputs, grads)
        found = torch.autograd.grad(ctx.outputs, [*ctx.inputs, *piece.trained], piece.grad_outputs)
        for param, grad in zip(piece.trained, found[len(ctx.inputs) :]):
            param.grad = grad.clone()
        layer_graphs._put(piece.grad_inputs, found[: len(ctx.inputs)])
        return None, *(x.detach() for x in piece.grad_inputs)


def capture_here(slot: Slot) -> None:
    """Capture the pieces without a GPU: they compute once, and their tensors are those of a capture."""

    def capturing(piece: GraphSection, pool: object) -> contextlib.AbstractContextManager:
        piece._graphs.append(Mock())
        return contextlib.nullcontext()

    for piece in slot.sections:
        for param in piece.trained:
            param.main_grad = torch.zeros_like(param)
    with patch.object(GraphSection, "_capturing", capturing), patch.object(torch.cuda, "graph_pool_handle"):
        slot._capture()


class InBuffers(torch.autograd.Function):
    """A computation that writes its results where it may, as kernels do."""

    used = 0

    @staticmethod
    def forward(ctx, buffers, attend, *qkv):
        with torch.enable_grad():
            ctx.qkv = [x.detach().requires_grad_() for x in qkv]
            ctx.out, ctx.buffers = attend(*ctx.qkv), buffers
        out = ctx.out.detach()
        if buffers is not None and buffers.out is not None:
            out = buffers.out.copy_(out.view(buffers.out.shape)).view(out.shape)
            InBuffers.used += 1
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors  # fails if somebody wrote there since
        assert torch.equal(out, ctx.out)
        torch.autograd.backward(ctx.out, grad)  # for parameters too
        grads = [x.grad for x in ctx.qkv]
        if ctx.buffers is not None:
            pairs = zip(ctx.buffers.grads, grads, strict=True)
            grads = [x if place is None else place.copy_(x) for place, x in pairs]
        return None, None, *grads


def test_an_attention_may_write_into_the_memory_of_the_pieces(pair, monkeypatch):
    """Nothing that a backward pass needs is overwritten: by attention, by gates after it, by the gated delta net."""
    core, rule, gate_heads = TorchVarlenAttention.forward, delta.gated_delta_net, attention._gated

    def forward(self, *qkv, packed_seq_params, **rest):
        qkv = qkv[:3]
        call = lambda *qkv: core(self, *qkv, packed_seq_params=packed_seq_params)  # noqa: E731
        return InBuffers.apply(packed_seq_params.buffers, call, *qkv)

    def net(mixed, z, b, a, *rest):
        *settings, buffers = rest
        return InBuffers.apply(buffers, lambda *inputs: rule(*inputs, *settings), mixed, z, b, a)

    def gated(attended, gate, buffers):
        return InBuffers.apply(
            ResultBuffers(buffers[0], (None, buffers[1])), lambda x, g: gate_heads(x, g, ()), attended, gate
        )

    monkeypatch.setattr(layer_graphs, "_Replay", InFixedMemory)
    model = pair.ours
    wanted = torch.autograd.grad(model(pair.batch).sum(), list(model.parameters()))
    monkeypatch.setattr(TorchVarlenAttention, "forward", forward)
    monkeypatch.setattr(delta, "gated_delta_net", net)
    monkeypatch.setattr(attention, "_gated", gated)
    monkeypatch.setattr(InBuffers, "used", 0)
    layers = model.language.decoder.layers
    with in_pieces(model) as graphs:
        capture_here(graphs.slots[0])
        for _ in range(2):
            model.zero_grad()
            model(pair.batch).sum().backward()
    assert InBuffers.used == 2 * len(layers[:-1])
    for (name, param), grad in zip(model.named_parameters(), wanted, strict=True):
        assert torch.equal(param.grad, grad), name
    model.zero_grad()


def test_slices_of_one_tensor_are_joined_without_a_copy():
    whole = torch.randn(3, 96, requires_grad=True)
    parts = SplitRows.apply(whole, (48, 16, 32))
    memory = layer_graphs._memory_like([part.detach() for part in parts])
    apart = [torch.randn_like(part) for part in parts]
    for place, grad in zip(memory, apart, strict=True):
        place.copy_(grad)
    for grads, is_copied in ((memory, False), (apart, True)):
        (gradient,) = torch.autograd.grad(parts, whole, grads, retain_graph=True)
        assert torch.equal(gradient, torch.cat(apart, 1))
        assert (gradient.data_ptr() != grads[0].data_ptr()) == is_copied
    assert joined([memory[1], memory[0], memory[2]]) is None


def test_slices_that_kernels_would_be_compiled_anew_for_get_memory_of_their_own():
    memory = layer_graphs._memory_like(torch.randn(3, 44).split((32, 8, 4), dim=1))
    assert all(x.is_contiguous() for x in memory)


def test_pieces_train_where_nothing_before_them_is_trained(pair, monkeypatch):
    """This is the case with adapters in the language model only."""
    monkeypatch.setattr(layer_graphs, "_Replay", InFixedMemory)
    model = pair.ours
    trained = {name: p for name, p in model.named_parameters() if "layers" in name and "linear_fc1.weight" in name}
    trained = {name: p for name, p in trained.items() if name.startswith("language")}
    model.requires_grad_(False)
    for param in trained.values():
        param.requires_grad = True
    try:
        wanted = torch.autograd.grad(model(pair.batch).sum(), list(trained.values()))
        with in_pieces(model) as graphs:
            capture_here(graphs.slots[0])
            model(pair.batch).sum().backward()
        for (name, param), grad in zip(trained.items(), wanted, strict=True):
            assert param.grad is not None, name
            assert torch.equal(param.grad, grad), name
    finally:
        model.zero_grad()
        model.requires_grad_(True)


@pytest.mark.parametrize(
    ("device", "update", "parallel", "expected"),
    [
        (CUDA, {}, {}, True),
        (CUDA, {}, {"tp": 2, "cp": 2, "sequence_parallel": True}, True),
        (CUDA, {}, {"recompute": "selective"}, True),
        (CPU, {}, {}, False),
        (CUDA, {"cuda_graphs": False}, {}, False),
        (CUDA, {}, {"pp": 2}, True),
        (CUDA, {}, {"pp": 2, "vpp": 2}, False),
        (CUDA, {}, {"recompute": "full"}, False),
        (CUDA, {}, {"sharding": "fsdp"}, False),
    ],
)
def test_graphs_where_they_are_possible(tmp_path, device, update, parallel, expected):
    run = write_job(tmp_path, num_steps=3, bins=make_bins())
    train = run.train.model_copy(update={"precision": "bfloat16"})
    run = changed(run, train=train, parallel=ParallelConfig(**parallel), **update)
    assert loop.can_capture_graphs(run, device) is expected
    for precision in ("float32", "float8"):
        other = run.model_copy(update={"train": train.model_copy(update={"precision": precision})})
        assert not loop.can_capture_graphs(other, device)
    balanced = train.model_copy(update={"experts": ExpertsConfig(coefficient=1e-3)})
    assert not loop.can_capture_graphs(run.model_copy(update={"train": balanced}), device)


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_given_up_however_training_ends(monkeypatch, fails):
    """NCCL would wait for them at the end of the process groups."""
    model = Mock()
    trainer = Mock(chunks=[Mock(module=model)])
    monkeypatch.setattr(loop, "can_capture_graphs", lambda *_: True)
    with pytest.raises(RuntimeError) if fails else loop.cuda_graphs(trainer):
        if fails:
            with loop.cuda_graphs(trainer):
                raise RuntimeError
        model.capture_graphs.assert_called_once()
        model.release_graphs.assert_not_called()
    model.release_graphs.assert_called_once()
