"""Ragged against plain lists of tensors, on seeded random cases and on the small ones that go wrong."""

import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch
import torch.multiprocessing

from tests.helpers.bins import MIXED, TEXT_ONLY, make_samples
from tests.helpers.hardware import requires_gpus
from trainer.batch import Geometry, MicroBatch, make_micro_batch
from trainer.ragged import Ragged

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]
SEEDS = range(24)


def draw(seed: int) -> tuple[list[torch.Tensor], Ragged, np.random.Generator]:
    """A few members, some of length 0, sometimes none; every dtype and number of dimensions comes up."""
    rng = np.random.default_rng(seed)
    trailing = [(), (3,), (2, 0), (2, 4)][seed % 4]
    dtype = DTYPES[seed // 4 % 4]
    lengths = rng.choice([0, 0, 1, 2, 7], rng.integers(0, 7))
    members = [torch.from_numpy(rng.integers(0, 200, (n, *trailing))).to(dtype) for n in lengths]
    return members, Ragged.of(members, like=torch.empty(0, *trailing, dtype=dtype)), rng


def assert_members(ragged: Ragged, expected: list[torch.Tensor]) -> None:
    assert len(ragged) == len(expected) == len(list(ragged))
    assert ragged.lengths == tuple(len(e) for e in expected)
    for number, (iterated, member) in enumerate(zip(ragged, expected)):
        for found in (iterated, ragged[number], ragged[number - len(expected)]):
            assert found.dtype == member.dtype and found.shape == member.shape and torch.equal(found, member)


@pytest.mark.parametrize("seed", SEEDS)
def test_it_holds_what_a_list_holds(seed):
    members, ragged, _ = draw(seed)
    assert_members(ragged, members)
    assert_members(Ragged(ragged.values, ragged.lengths), members)
    assert ragged.starts == tuple(sum(ragged.lengths[:n]) for n in range(len(members) + 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_parts_of_it_are_those_of_a_list(seed):
    members, ragged, rng = draw(seed)
    bounds = [None, *range(-8, 9)]
    for _ in range(30):
        start, stop, step = (bounds[rng.integers(len(bounds))] for _ in range(3))
        step = step or None
        assert_members(ragged[start:stop:step], members[start:stop:step])
    numbers = rng.integers(-len(members), len(members), 9).tolist() if members else []
    assert_members(ragged[numbers], [members[n] for n in numbers])
    assert_members(ragged[np.array(numbers, np.int64)], [members[n] for n in numbers])
    for part in (ragged[3:3], ragged[[]]):
        assert part.values.dtype == ragged.values.dtype and part.values.shape == (0, *ragged.values.shape[1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_made_of_it_is_what_is_made_of_a_list(seed):
    members, ragged, _ = draw(seed)
    assert_members(ragged.repeat(3), members * 3)
    assert_members(ragged.repeat_interleave(3), [m for m in members for _ in range(3)])
    assert_members(ragged.repeat(0), [])
    assert_members(Ragged.cat([ragged, ragged[1:1], ragged[::-1]]), members + members[::-1])
    assert_members(ragged.map(torch.Tensor.double), [m.double() for m in members])


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_are_cut_where_torch_cuts(seed):
    members, ragged, _ = draw(seed)
    for count in (1, 2, 3, 5, 9):
        numbers = torch.arange(len(members)).chunk(count)
        chunks = ragged.chunk(count)
        assert [len(chunk) for chunk in chunks] == [len(n) for n in numbers]
        for chunk, chosen in zip(chunks, numbers):
            assert_members(chunk, [members[n] for n in chosen])
        assert Ragged.cat(chunks) == ragged


def test_members_slices_and_chunks_are_views():
    ragged = Ragged.of([torch.zeros(2), torch.zeros(0), torch.zeros(3)])
    ragged[2][0] = 1
    ragged[1:].values[1] = 2
    ragged.chunk(2)[1].values[2] = 3
    next(iter(ragged))[0] = 4
    assert ragged.values.tolist() == [4, 0, 1, 2, 3]
    for part in (ragged[[0, 2]], ragged[::2], ragged.repeat(1), Ragged.of(list(ragged)), Ragged.cat([ragged])):
        part.values.fill_(9)
    assert ragged.values.tolist() == [4, 0, 1, 2, 3]


def test_gradients_go_through():
    values = torch.arange(5.0, requires_grad=True)
    ragged = Ragged(values, (2, 0, 3))
    (ragged[2].sum() + 10 * ragged[[0, 0]].values.sum()).backward()
    assert values.grad.tolist() == [20, 20, 1, 1, 1]


def test_equality():
    ragged = Ragged.of([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert ragged == Ragged(torch.tensor([1.0, 2.0, 3.0]), (2, 1))
    assert ragged == ragged[:] and ragged in [ragged[:1], ragged[:]]
    assert ragged != Ragged(ragged.values, (1, 2))  # the same values, cut elsewhere
    assert ragged != Ragged(ragged.values, (2, 1, 0))
    assert ragged != ragged.map(lambda v: v + 1)
    assert ragged != ragged.map(torch.Tensor.double)
    assert ragged != ragged.to("meta")
    assert ragged != [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    assert Ragged.of([]) != Ragged.of([], like=torch.empty(0, 2))
    nan = Ragged.of([torch.tensor([float("nan")])])
    assert nan != copy.deepcopy(nan)
    with pytest.raises(TypeError, match="unhashable"):
        hash(ragged)


def test_it_cannot_be_changed_into_another():
    ragged = Ragged.of([torch.zeros(2)])
    with pytest.raises(dataclasses.FrozenInstanceError):
        ragged.lengths = (1, 1)
    assert dataclasses.replace(ragged, lengths=[1, 1]).starts == (0, 1, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_pickle_and_copies(seed):
    _, ragged, _ = draw(seed)
    for back in (pickle.loads(pickle.dumps(ragged)), copy.deepcopy(ragged), copy.copy(ragged)):
        assert back == ragged and back.starts == ragged.starts
    file = io.BytesIO()
    torch.save(ragged, file)
    file.seek(0)
    assert torch.load(file, weights_only=False) == ragged


def test_a_pickled_slice_does_not_carry_the_batch():
    ragged = Ragged(torch.zeros(100_000, dtype=torch.bfloat16), (10, 99_990))
    assert len(pickle.dumps(ragged)) > 200_000
    assert len(pickle.dumps(ragged[:1])) < 2_000
    assert pickle.loads(pickle.dumps(ragged[:1])) == ragged[:1]


def _add_one(inbox, outbox) -> None:
    outbox.put(inbox.get().map(lambda values: values + 1))
    inbox.get()  # the other side has read the answer, whose memory is this process's


def test_it_crosses_processes():
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=_add_one, args=(inbox, outbox))
    process.start()
    ragged = Ragged.of([torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(0, 3, dtype=torch.bfloat16)])
    inbox.put(ragged[:])
    back = outbox.get()
    assert back == ragged.map(lambda values: values + 1)
    inbox.put("read")
    process.join()
    assert process.exitcode == 0


def test_to_keeps_the_lengths():
    ragged = Ragged.of([torch.zeros(2, 3), torch.zeros(0, 3)])
    moved = ragged.to("meta")
    assert moved.values.device.type == "meta" and moved.lengths == (2, 0)
    assert ragged.to("cpu", non_blocking=True) == ragged


@requires_gpus(1)
@pytest.mark.parametrize("seed", range(4))
def test_pinned_and_moved(seed):
    _, ragged, _ = draw(seed)
    pinned = ragged.pin_memory()
    assert pinned == ragged and (pinned.values.is_pinned() or not pinned.values.numel())
    moved = pinned.to("cuda", non_blocking=True)
    assert moved.values.is_cuda and moved.to("cpu") == ragged and moved != ragged


def test_repr_says_how_much_of_what():
    ragged = Ragged.of([torch.zeros(2, 3), torch.zeros(0, 3)])
    assert repr(ragged) == "Ragged(2 members of lengths [2, 0], (2, 3) torch.float32 cpu)"
    assert repr(ragged.repeat(5)) == (
        "Ragged(10 members of lengths [2, 0, 2, 0, 2, 0, 2, 0, ...], (10, 3) torch.float32 cpu)"
    )
    assert repr(Ragged.of([])) == "Ragged(0 members of lengths [], (0,) torch.float32 cpu)"


A, B = torch.zeros(2, 3), torch.zeros(4, 5)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: Ragged.of([A, A, B]), ValueError, r"member 2 is \(4, 5\), but member 0 is \(2, 3\)"),
        (lambda: Ragged.of([A, A[0]]), ValueError, r"member 1 is \(3,\), but member 0 is \(2, 3\)"),
        (lambda: Ragged.of([A, A.half()]), ValueError, "member 1 is torch.float16 on cpu, but member 0 is torch.float"),
        (lambda: Ragged.of([A, A.to("meta")]), ValueError, "member 1 is torch.float32 on meta"),
        (lambda: Ragged.of([A, None]), TypeError, "member 1 is a NoneType; for nothing, give a tensor of length 0"),
        (lambda: Ragged.of([torch.tensor(1.0)]), ValueError, "member 0 has no first size"),
        (lambda: Ragged.cat([Ragged.of([A]), Ragged.of([])]), ValueError, r"part 1 is \(0,\), but part 0 is \(2, 3\)"),
        (lambda: Ragged.cat([]), ValueError, "cat of nothing"),
        (lambda: Ragged(A, (1, 2)), ValueError, r"3 rows by lengths, but values are \(2, 3\)"),
        (lambda: Ragged(torch.tensor(1.0), ()), ValueError, r"0 rows by lengths, but values are \(\)"),
        (lambda: Ragged(A, (3, -1)), ValueError, "member 1 has length -1"),
        (lambda: Ragged(A, (1.0, 1.0)), TypeError, "float"),
        (lambda: Ragged.of([A]).map(lambda v: v[1:]), ValueError, r"2 rows by lengths, but values are \(1, 3\)"),
        (lambda: Ragged.of([A])[1], IndexError, "member 1 of 1"),
        (lambda: Ragged.of([A])[[0, -2]], IndexError, "member -2 of 1"),
        (lambda: Ragged.of([A])[[True]], TypeError, "no bool"),
        (lambda: Ragged.of([A])["0"], TypeError, "str"),
        (lambda: Ragged.of([A]).chunk(0), ValueError, "cannot cut into 0 chunks"),
    ],
)
def test_what_is_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def assert_same_fields(a: MicroBatch, b: MicroBatch) -> None:
    for field in dataclasses.fields(MicroBatch):
        x, y = getattr(a, field.name), getattr(b, field.name)
        is_same = x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        assert is_same, field.name


@pytest.mark.parametrize("kinds", [MIXED, [TEXT_ONLY]])
def test_a_micro_batch_is_pickled_and_moved_whole(kinds):
    geometry = Geometry(image_token_id=9, spatial_merge_size=2, position_side=8, patch_bytes=12)
    batch = make_micro_batch(make_samples(kinds, geometry, range(20, 90)), geometry, 96)
    assert_same_fields(pickle.loads(pickle.dumps(batch)), batch)
    assert_same_fields(batch.to(torch.device("cpu")), batch)
    moved = batch.to(torch.device("meta"))
    for field in dataclasses.fields(MicroBatch):
        value = getattr(moved, field.name)
        tensor = value.values if isinstance(value, Ragged) else value
        assert not isinstance(tensor, torch.Tensor) or tensor.is_meta, field.name
