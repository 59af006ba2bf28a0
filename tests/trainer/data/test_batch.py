"""The rules of a bin by hand; the whole of what each rank gets is checked in test_batch_reference.py."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.bins import MIXED, make_samples
from tests.helpers.hardware import requires_gpus
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir
from trainer.data.micro_batch import Geometry, geometry_of, make_micro_batch
from trainer.data.slices import zigzag_order
from trainer.model.registry import read_model

GEOMETRY = Geometry(image_token_id=9, spatial_merge_size=2, patch_bytes=12, video_token_id=8)


def chat(ids: list[int], mask: list[int]) -> TokenizedSample:
    return TokenizedSample(
        key="made/00000000",
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.uint8),
        image_grid_thw=np.empty((0, 3), np.int32),
        is_video=np.empty(0, bool),
        later_patches=np.empty((0, 12), np.uint8),
        patches=np.empty((0, 12), np.uint8),
    )


def test_a_token_is_learnt_from_the_place_before_it():
    batch = make_micro_batch([chat([11, 12, 13, 14], [0, 0, 1, 1]), chat([21, 22, 23], [1, 0, 1])], GEOMETRY, 10)
    # the first token of a sample has nothing before it, whatever its mask says
    assert list(zip(batch.loss_index.tolist(), batch.labels.tolist())) == [(1, 13), (2, 14), (5, 23)]
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 21, 22, 23, 0, 0, 0]]


def test_the_token_after_the_next_is_of_the_same_sample():
    geometry = dataclasses.replace(GEOMETRY, predicts_second=True)
    samples = [chat([11, 12, 13, 14], [1, 1, 0, 1]), chat([21], [1]), chat([31, 32, 33], [1, 1, 1])]
    batch = make_micro_batch(samples, geometry, 10)
    assert batch.next_ids.tolist() == [[12, 13, 14, 14, 21, 32, 33, 33, 0, 0]]
    assert list(zip(batch.second_index.tolist(), batch.second_labels.tolist())) == [(1, 14), (5, 33)]


def test_each_segment_is_cut_in_zigzag_halves():
    # one segment of 8 and one of 4 tokens: rank 0 has the first and the last quarter of each
    order = zigzag_order(np.array([0, 8, 12]), 2).reshape(2, -1)
    assert order.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_every_token_has_one_rank_and_causal_attention_costs_all_alike(cp):
    bounds = np.cumsum([0, 2 * cp, 10 * cp, 4 * cp])
    order = zigzag_order(bounds, cp)
    assert sorted(order) == list(range(bounds[-1]))
    start = np.repeat(bounds[:-1], np.diff(bounds))
    seen = [(places - start[places] + 1).sum() for places in order.reshape(cp, -1)]
    assert len(set(seen)) == 1


def test_too_many_tokens_are_refused_with_the_keys():
    with pytest.raises(ValueError, match=r"samples of 4 tokens do not fit in seq_len=3: \['made/00000000'\]"):
        make_micro_batch([chat([1, 2, 3, 4], [0, 0, 0, 1])], GEOMETRY, 3)


def test_a_model_of_text_alone_has_three_equal_rows_and_nothing_of_images():
    text = geometry_of(read_model(text_hf_dir())[1])
    batch = make_micro_batch([chat([11, 9, 13], [0, 1, 1]), chat([21, 22], [0, 1])], text, 8)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]] * 3
    assert batch.image_patches == () and batch.vision_cu_seqlens.tolist() == [0] and batch.gathered_rows == 0
    assert all(len(t) == 0 for t in (batch.patches, batch.patch_coordinates, batch.image_index, batch.image_rows))
    with pytest.raises(ValueError, match=r"made/00000000: 1 images, but the model takes text alone"):
        make_micro_batch(make_samples([MIXED[0]], GEOMETRY, range(20, 90)), text, 96)


def test_a_family_may_have_positions_of_its_own():
    def halves(length: int, starts: list[int], grids: list[list[int]]) -> np.ndarray:
        assert starts == [3] and grids == [[1, 2, 3]]
        return np.tile(np.arange(length) // 2, (3, 1))

    sample = chat([1, 2, 3, *[9] * 6, 4], [0] * 10)
    sample = dataclasses.replace(
        sample,
        image_grid_thw=np.array([[1, 4, 6]], np.int32),
        is_video=np.array([False]),
        patches=np.zeros((24, 12), "u1"),
    )
    batch = make_micro_batch([sample], dataclasses.replace(GEOMETRY, positions=halves), 12)
    assert batch.position_ids.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0]] * 3


def test_a_model_whose_patches_span_other_than_two_frames_takes_no_videos():
    shape = read_model(tiny_hf_dir())[1]
    assert geometry_of(shape).video_token_id == shape.images.video_token_id is not None
    other = dataclasses.replace(shape, vision=dataclasses.replace(shape.vision, temporal_patch_size=1))
    assert geometry_of(other).video_token_id is None
    ids = dataclasses.replace(shape.images, video_token_id=None)
    assert geometry_of(dataclasses.replace(shape, images=ids)).video_token_id is None


def test_every_tensor_is_moved():
    batch = make_micro_batch(make_samples(MIXED, GEOMETRY, range(20, 90)), GEOMETRY, 96)
    moved = batch.to(torch.device("meta"))
    for field in dataclasses.fields(batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        if isinstance(before, torch.Tensor):
            assert after.is_meta and (after.shape, after.dtype) == (before.shape, before.dtype), field.name
        else:
            assert after == before, field.name


@pytest.mark.parametrize(("in_chunks", "kinds"), [(False, MIXED[:4]), (True, MIXED), (False, MIXED)])
def test_a_packed_batch_is_the_same_and_needs_a_copy_for_each_large_tensor(in_chunks, kinds):
    geometry = dataclasses.replace(GEOMETRY, in_chunks=in_chunks)
    batch = make_micro_batch(make_samples(kinds, geometry, range(20, 90)), geometry, 96)
    large = {"patches", "later_patches"} if len(batch.later_patches) else {"patches"}
    packed = batch.packed(pin=False)
    for name, tensor in batch.tensors().items():
        same = packed.tensors()[name]
        assert same.dtype == tensor.dtype and torch.equal(same, tensor), name
        own = same.untyped_storage().data_ptr() != packed.small.memory.untyped_storage().data_ptr()
        assert own == (name in large)
    with Copies() as copies:
        moved = packed.to(torch.device("meta"))
    assert copies.number == 1 + len(large) and moved.small is None
    assert {name: t.shape for name, t in moved.tensors().items()} == {n: t.shape for n, t in batch.tensors().items()}
    assert all(tensor.is_meta for tensor in moved.tensors().values())
    if in_chunks:
        assert torch.equal(packed.chunks.spans, batch.chunks.spans) and moved.chunks.spans.is_meta


class Copies(TorchDispatchMode):
    """A mode that counts copies from one device to another."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@requires_gpus(1)
def test_pinned_and_moved():
    batch = make_micro_batch(make_samples(MIXED, GEOMETRY, range(20, 90)), GEOMETRY, 96)
    pinned = batch.packed(pin=True)
    moved = pinned.to(torch.device("cuda"))
    for name, tensor in batch.tensors().items():
        assert pinned.tensors()[name].is_pinned() and moved.tensors()[name].is_cuda, name
        assert torch.equal(moved.tensors()[name].cpu(), tensor), name
