import numpy as np
import pytest
import torch

from tests.helpers.bins import MIXED, TEXT_ONLY, TWO_IMAGES, make_samples
from trainer.data.micro_batch import Geometry, make_micro_batch
from trainer.data.slices import RankSlice, share_images, zigzag_order

GEOMETRY = Geometry(image_token_id=9, spatial_merge_size=2, patch_bytes=12)
SEQ_LEN = 192


def test_each_segment_is_cut_in_zigzag_halves():
    # one segment of 8 and one of 4 tokens: rank 0 has the first and the last quarter of each
    order = zigzag_order(np.array([0, 8, 12]), 2).reshape(2, -1)
    assert order.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert zigzag_order(np.array([0, 8, 12]), 1).tolist() == list(range(12))


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_every_token_has_one_rank_and_causal_attention_costs_all_alike(cp):
    bounds = np.cumsum([0, 2 * cp, 10 * cp, 4 * cp])
    order = zigzag_order(bounds, cp)
    assert sorted(order) == list(range(bounds[-1]))
    start = np.repeat(bounds[:-1], np.diff(bounds))
    seen = [(places - start[places] + 1).sum() for places in order.reshape(cp, -1)]
    assert len(set(seen)) == 1


def test_images_are_shared_by_patches_and_found_again():
    patches = [8, 64, 16, 16, 24]
    shares = [
        share_images(patches, 4, RankSlice(vision_ranks=2, vision_rank=rank, vision_shares=2, vision_share=rank))
        for rank in range(2)
    ]
    assert [share.images for share in shares] == [(1,), (0, 2, 3, 4)]
    assert [share.tokens for share in shares] == [16, 16] and shares[0].gathered_rows == 16
    gathered = np.concatenate([np.repeat(share.images, [patches[i] // 4 for i in share.images]) for share in shares])
    rows = [first + token for first, count in zip(shares[0].first_rows, patches) for token in range(count // 4)]
    assert gathered[rows].tolist() == np.repeat(range(5), np.array(patches) // 4).tolist()
    assert shares[1].first_rows == shares[0].first_rows


def test_the_shorter_share_is_filled_up():
    shares = [
        share_images([4, 40], 4, RankSlice(vision_ranks=2, vision_rank=rank, vision_shares=2, vision_share=rank))
        for rank in range(2)
    ]
    assert [s.tokens for s in shares] == [10, 1] and [s.gathered_rows for s in shares] == [10, 10]
    assert shares[0].first_rows == (10, 0)


def test_images_that_pipeline_ranks_share_follow_one_another_at_their_place():
    patches = [8, 64, 16, 16, 24, 4, 12]
    places, stages = 2, 3
    parts = [
        [
            RankSlice(vision_ranks=places, vision_rank=q, vision_shares=places * stages, vision_share=p * places + q)
            for p in range(stages)
        ]
        for q in range(places)
    ]
    shares = [[share_images(patches, 4, part) for part in at_place] for at_place in parts]
    rows = []
    for at_place in shares:
        for stage, share in enumerate(at_place):
            assert share.arriving_tokens == tuple(s.tokens for p, s in enumerate(at_place) if p != stage)
        mine = [image for share in at_place for image in share.images for _ in range(patches[image] // 4)]
        rows += mine + [None] * (at_place[0].gathered_rows - len(mine))
    assert None not in rows[: shares[0][0].gathered_rows] or None not in rows[shares[0][0].gathered_rows :]
    assert [rows[first] for first in shares[1][2].first_rows] == list(range(len(patches)))
    assert sorted(row for row in rows if row is not None) == sorted(
        image for image, count in enumerate(patches) for _ in range(count // 4)
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_no_image_no_rows(ranks):
    share = share_images([], 4, RankSlice(vision_ranks=ranks, vision_shares=ranks))
    assert share.images == share.first_rows == () and share.tokens == share.gathered_rows == 0


def _parts(samples, cp: int, sp: int) -> list:
    return [
        make_micro_batch(
            samples,
            GEOMETRY,
            SEQ_LEN,
            RankSlice(
                pad_multiple=2 * cp,
                cp=cp,
                cp_rank=c,
                sequence_ranks=sp,
                sequence_rank=s,
                vision_ranks=cp * sp,
                vision_rank=c * sp + s,
                vision_shares=cp * sp,
                vision_share=c * sp + s,
            ),
        )
        for c in range(cp)
        for s in range(sp)
    ]


@pytest.mark.parametrize(("cp", "sp"), [(1, 2), (2, 1), (2, 2), (4, 3)])
def test_the_parts_of_all_ranks_are_the_bin(cp, sp):
    samples = make_samples([*MIXED, TEXT_ONLY, TWO_IMAGES], GEOMETRY, range(20, 90))
    (whole,) = (
        _parts(samples, cp, 1)
        if cp == 1
        else [make_micro_batch(samples, GEOMETRY, SEQ_LEN, RankSlice(pad_multiple=2 * cp))]
    )
    parts = _parts(samples, cp, sp)
    order = torch.from_numpy(zigzag_order(whole.cu_seqlens.numpy(), cp))
    pieces = parts[::sp]
    assert torch.equal(torch.cat([p.input_ids for p in pieces], 1), whole.input_ids[:, order])
    assert torch.equal(torch.cat([p.position_ids for p in pieces], 1), whole.position_ids[:, order])
    places = [p.loss_index + i * SEQ_LEN // cp for i, p in enumerate(pieces)]
    learnt = sorted(zip(order[torch.cat(places)].tolist(), torch.cat([p.labels for p in pieces]).tolist()))
    assert learnt == list(zip(whole.loss_index.tolist(), whole.labels.tolist()))
    assert np.sum([p.loss_lengths for p in pieces], 0).tolist() == list(whole.loss_lengths)
    held = torch.cat([p.image_index + i * SEQ_LEN // (cp * sp) for i, p in enumerate(parts)])
    assert sorted(order[held].tolist()) == whole.image_index.tolist()


@pytest.mark.parametrize(("cp", "sp"), [(1, 2), (2, 2)])
def test_an_image_token_finds_the_row_that_its_image_made(cp, sp):
    samples = make_samples([*MIXED, TEXT_ONLY, TWO_IMAGES], GEOMETRY, range(20, 90))
    parts = _parts(samples, cp, sp)
    whole = make_micro_batch(samples, GEOMETRY, SEQ_LEN, RankSlice(pad_multiple=2 * cp))
    # the vision encoder's place is taken by the first byte of each token's first patch
    made = {rank: p.patches[::4, 0][: p.encoded_rows] for rank, p in enumerate(parts)}
    gathered = torch.cat(
        [torch.nn.functional.pad(rows, (0, parts[0].gathered_rows - len(rows))) for rows in made.values()]
    )
    order = torch.from_numpy(zigzag_order(whole.cu_seqlens.numpy(), cp))
    wanted = dict(zip(whole.image_index.tolist(), whole.patches[::4, 0].tolist()))
    for rank, part in enumerate(parts):
        mine = order.reshape(cp * sp, -1)[rank][part.image_index]
        assert [wanted[place] for place in mine.tolist()] == gathered[part.image_rows].tolist()


def test_a_rank_beyond_the_first_of_the_pipeline_gets_no_pixels_and_all_positions():
    samples = make_samples(MIXED, GEOMETRY, range(20, 90))
    part = make_micro_batch(samples, GEOMETRY, SEQ_LEN, RankSlice(has_vision=False))
    whole = make_micro_batch(samples, GEOMETRY, SEQ_LEN)
    assert len(part.patches) == len(part.image_index) == 0
    assert torch.equal(part.position_ids, whole.position_ids) and part.image_patches == whole.image_patches
    assert torch.equal(part.labels, whole.labels) and part.loss_lengths == whole.loss_lengths


def test_a_bin_of_nothing_is_padding():
    batch = make_micro_batch([], GEOMETRY, 16, RankSlice(pad_multiple=4, cp=2, cp_rank=1))
    assert batch.cu_seqlens.tolist() == [0, 16] and batch.input_ids.shape == (1, 8)
    assert batch.num_tokens == batch.num_loss_tokens == len(batch.loss_index) == 0 and batch.num_slots == 16
