import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.bins import MIXED, TEXT_ONLY, make_samples
from tests.helpers.hardware import requires_gpus
from tests.helpers.tiny_text_model import text_hf_dir
from trainer.data.micro_batch import Geometry, geometry_of, make_micro_batch
from trainer.data.slices import RankSlice
from trainer.model.registry import read_model

GEOMETRY = Geometry(image_token_id=9, spatial_merge_size=2, patch_bytes=12)


def chat(ids: list[int], mask: list[int]) -> TokenizedSample:
    return TokenizedSample(
        key="made/00000000",
        input_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.uint8),
        image_grid_thw=np.empty((0, 3), np.int32),
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


def test_padding_is_a_segment_of_its_own():
    batch = make_micro_batch([chat([11, 12, 13], [0, 1, 1])], GEOMETRY, 8)
    assert batch.cu_seqlens.tolist() == [0, 3, 8]
    assert batch.max_seqlen == 5
    full = make_micro_batch([chat([11, 12, 13], [0, 1, 1])], GEOMETRY, 3)
    assert full.cu_seqlens.tolist() == [0, 3]


def test_samples_are_padded_to_the_multiple():
    batch = make_micro_batch([chat([11, 12, 13], [0, 1, 1]), chat([21], [1])], GEOMETRY, 12, RankSlice(pad_multiple=4))
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 12]
    assert batch.input_ids[0, 4] == 21
    assert batch.num_tokens == 4


def test_too_many_tokens_are_refused_with_the_keys():
    with pytest.raises(ValueError, match=r"samples of 4 tokens do not fit in seq_len=3: \['made/00000000'\]"):
        make_micro_batch([chat([1, 2, 3, 4], [0, 0, 0, 1])], GEOMETRY, 3)


def test_images_of_all_samples_are_in_order():
    samples = make_samples(MIXED, GEOMETRY, range(20, 90))
    batch = make_micro_batch(samples, GEOMETRY, 96)
    assert torch.equal(batch.patches, torch.from_numpy(np.concatenate([s.patches for s in samples])))
    assert (batch.input_ids[0, batch.image_index] == 9).all()
    assert len(batch.image_index) == len(batch.patches) // 4
    assert batch.vision_cu_seqlens[-1] == len(batch.patches) == sum(batch.image_patches)


def test_a_bin_without_an_image_carries_a_blank_one_that_nobody_sees():
    batch = make_micro_batch(make_samples([TEXT_ONLY], GEOMETRY, range(20, 90)), GEOMETRY, 16)
    assert batch.patches.shape == (4, 12) and len(batch.image_index) == 0 and batch.image_patches == ()
    assert batch.vision_cu_seqlens.tolist() == [0, 4]


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
        sample, image_grid_thw=np.array([[1, 4, 6]], np.int32), patches=np.zeros((24, 12), "u1")
    )
    batch = make_micro_batch([sample], dataclasses.replace(GEOMETRY, positions=halves), 12)
    assert batch.position_ids.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 0]] * 3


@pytest.mark.parametrize("kinds", [MIXED, [TEXT_ONLY], []])
def test_every_tensor_is_moved(kinds):
    batch = make_micro_batch(make_samples(kinds, GEOMETRY, range(20, 90)), GEOMETRY, 96)
    moved = batch.to(torch.device("meta"))
    for field in dataclasses.fields(batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        if isinstance(before, torch.Tensor):
            assert after.is_meta and (after.shape, after.dtype) == (before.shape, before.dtype), field.name
        else:
            assert after == before, field.name


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_packed_batch_is_the_same_and_needs_two_copies(in_chunks):
    geometry = dataclasses.replace(GEOMETRY, in_chunks=in_chunks)
    batch = make_micro_batch(make_samples(MIXED, geometry, range(20, 90)), geometry, 96)
    packed = batch.packed(pin=False)
    for name, tensor in batch.tensors().items():
        same = packed.tensors()[name]
        assert same.dtype == tensor.dtype and torch.equal(same, tensor), name
        own = same.untyped_storage().data_ptr() != packed.small.memory.untyped_storage().data_ptr()
        assert own == (name == "patches")
    with Copies() as copies:
        moved = packed.to(torch.device("meta"))
    assert copies.number == 2 and moved.small is None
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
