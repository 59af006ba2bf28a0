import numpy as np
import pytest
import torch

from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.bins import MIXED, TEXT_ONLY, make_samples
from trainer.batch import Geometry, make_micro_batch
from trainer.slices import RankSlice

GEOMETRY = Geometry(image_token_id=9, spatial_merge_size=2, position_side=8, patch_bytes=12)


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
    assert list(zip(batch.loss_index.tolist(), batch.labels.values.tolist())) == [(1, 13), (2, 14), (5, 23)]
    assert batch.input_ids.tolist() == [[11, 12, 13, 14, 21, 22, 23, 0, 0, 0]]


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
    assert torch.equal(batch.patches.values, torch.from_numpy(np.concatenate([s.patches for s in samples])))
    assert (batch.input_ids[0, batch.image_index] == 9).all()
    assert len(batch.image_index) == len(batch.patches.values) // 4
    assert batch.vision_cu_seqlens[-1] == len(batch.patches.values) == sum(batch.image_patches)


def test_a_bin_without_an_image_carries_a_blank_one_that_nobody_sees():
    batch = make_micro_batch(make_samples([TEXT_ONLY], GEOMETRY, range(20, 90)), GEOMETRY, 16)
    assert batch.patches.values.shape == (4, 12) and len(batch.image_index) == 0 and batch.image_patches == ()
    assert batch.vision_cu_seqlens.tolist() == [0, 4]
