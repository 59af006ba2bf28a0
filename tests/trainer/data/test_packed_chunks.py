"""The chunks of a bin, against loops over its segments; the data worker makes them and they travel with the bin."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from tests.helpers.bins import MIXED, make_samples
from tests.helpers.hardware import requires_gpus
from tests.helpers.reference import random_hf_dir
from tests.helpers.single_rank import build_tiny, single_rank
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from trainer.data.micro_batch import MicroBatch, geometry_of, make_micro_batch
from trainer.data.packed_chunks import CHUNK, PackedChunks
from trainer.data.slices import RankSlice
from trainer.model.registry import read_model

TENSORS = ("starts", "rows", "spans", "positions")


def by_segment(bounds: list[int]) -> dict[str, list]:
    starts, rows, spans, positions = [], [], [], []
    for begin, end in pairwise(bounds):
        first = list(range(begin, end, CHUNK))
        if first:
            spans.append([len(starts), len(starts) + len(first), begin, end])
        starts += first
        rows += [min(CHUNK, end - start) for start in first]
        positions += range(end - begin)
    spans.sort(key=lambda span: span[0] - span[1])  # the longest first; of equal ones the earlier
    return {"starts": starts, "rows": rows, "spans": spans, "positions": positions}


def assert_chunks_of(chunks: PackedChunks, bounds: list[int]) -> None:
    assert {name: getattr(chunks, name).tolist() for name in TENSORS} == by_segment(bounds)
    assert all(getattr(chunks, name).dtype == torch.int32 for name in TENSORS)
    assert chunks.bounds == tuple(sorted(set(bounds))) and chunks.tokens == bounds[-1]
    assert chunks.lengths() == [b - a for a, b in pairwise(bounds) if b > a]


@pytest.mark.parametrize("seed", range(40))
def test_they_are_those_of_loops_over_segments(seed):
    rng = np.random.default_rng(seed)
    edges = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK]
    lengths = [int(rng.choice([*edges, rng.integers(0, 900)])) for _ in range(rng.integers(1, 40))]
    bounds = [*accumulate(lengths, initial=0), sum(lengths) + 5]
    assert_chunks_of(PackedChunks.of(bounds), bounds)


def test_a_fall_is_refused():
    for bounds in ([0, 4, 2], [1, 4]):
        with pytest.raises(ValueError, match="rise from 0"):
            PackedChunks.of(bounds)


def bin_of(part: RankSlice) -> MicroBatch:
    geometry = geometry_of(read_model(hybrid_hf_dir())[1])
    return make_micro_batch(make_samples(MIXED, geometry, range(20, 90)), geometry, 192, part)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_bin_has_them_of_whole_segments_on_every_rank(cp):
    for rank in range(cp):
        batch = bin_of(RankSlice(pad_multiple=2 * cp if cp > 1 else 1, cp=cp, cp_rank=rank))
        assert_chunks_of(batch.chunks, batch.cu_seqlens.tolist())


def test_a_family_without_delta_layers_has_none():
    geometry = geometry_of(read_model(random_hf_dir("first"))[1])
    assert make_micro_batch(make_samples(MIXED, geometry, range(20, 90)), geometry, 192).chunks is None


def test_they_move_with_the_bin():
    moved = bin_of(RankSlice()).to(torch.device("meta")).chunks
    assert moved.table.is_meta and all(getattr(moved, name).is_meta for name in TENSORS)


def test_a_training_step_makes_none(monkeypatch):
    batch = bin_of(RankSlice())
    monkeypatch.setattr(PackedChunks, "of", lambda *_: pytest.fail("made on the thread that trains"))
    with single_rank() as mesh:
        build_tiny(hybrid_hf_dir(), mesh, 192)(batch).sum().backward()


@requires_gpus(1)
def test_one_copy_from_pinned_memory():
    batch = bin_of(RankSlice())
    pinned = batch.packed(pin=True)
    moved = pinned.to(torch.device("cuda")).chunks
    assert pinned.chunks.table.is_pinned() and pinned.chunks.spans.is_pinned()
    for name in TENSORS:
        ours = getattr(moved, name)
        assert ours.is_cuda and torch.equal(ours.cpu(), getattr(batch.chunks, name))
        assert ours.untyped_storage().data_ptr() == moved.table.untyped_storage().data_ptr()
