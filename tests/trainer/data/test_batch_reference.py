"""make_micro_batch against a reference that goes token by token and patch by patch, on bins of every kind."""

import dataclasses
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from dataset_builders.contracts.tokenized import TokenizedSample
from tests.helpers.bins import Kind, make_sample
from trainer.data.balance import spread_images
from trainer.data.micro_batch import Geometry, MicroBatch, make_micro_batch
from trainer.data.slices import RankSlice

IMAGE, VIDEO = 9, 8


def draw_sample(rng: np.random.Generator, geometry: Geometry) -> TokenizedSample:
    """Any number of images, and of videos of one temporal group or several, that may touch; any part of the text to be
    learnt."""
    merge, count = geometry.spatial_merge_size, int(rng.choice([0, 0, 1, 1, 2, 3]))
    sides = merge * rng.integers(1, 6, (count, 2))
    grids = tuple((1, int(h), int(w)) for h, w in sides)
    videos = tuple((int(rng.integers(1, 4)), *(merge * rng.integers(1, 4, 2)).tolist()) for _ in range(rng.integers(3)))
    kind = Kind(int(rng.integers(2, 20)), grids, learnt=float(rng.choice([0, 0.3, 0.9])), videos=videos)
    sample = make_sample(kind, geometry, range(20, 90), int(rng.integers(1 << 30)))
    is_image = np.isin(sample.input_ids, (IMAGE, VIDEO))
    slots = np.flatnonzero(is_image)
    if len(sample.image_grid_thw) < 2 or rng.random() < 0.5:
        return sample
    kept = np.ones(len(sample.input_ids), bool)
    kept[slots[0] : slots[-1] + 1] = is_image[slots[0] : slots[-1] + 1]
    return dataclasses.replace(sample, input_ids=sample.input_ids[kept], loss_mask=sample.loss_mask[kept])


def tokens_of(sample: TokenizedSample, merge: int) -> list[tuple[int, tuple[int, int, int], int | None]]:
    """(id, position, label) of each token; no label: None."""
    rows, grids, at = [], sample.image_grid_thw.tolist(), 0
    ids = sample.input_ids.tolist()
    while len(rows) < len(ids):
        if ids[len(rows)] not in (IMAGE, VIDEO):
            rows.append((at, at, at))
            at += 1
            continue
        t, h, w = grids.pop(0)
        h, w = h // merge, w // merge
        rows += [(at + f, at + r, at + c) for f in range(t) for r in range(h) for c in range(w)]
        at += max(h, w)
    labels = [ids[i + 1] if i + 1 < len(ids) and sample.loss_mask[i + 1] else None for i in range(len(ids))]
    return list(zip(ids, rows, labels))


def places_of(bounds: list[int], part: RankSlice) -> list[list[int]]:
    """The places of the bin that each context-parallel rank holds."""
    if part.cp == 1:
        return [list(range(bounds[-1]))]
    held: list[list[int]] = [[] for _ in range(part.cp)]
    for begin, end in pairwise(bounds):
        size = (end - begin) // (2 * part.cp)
        for place in range(begin, end):
            piece = (place - begin) // size
            held[min(piece, 2 * part.cp - 1 - piece)].append(place)
    return held


def patches_of(grid: tuple[int, int, int], merge: int) -> list[tuple[int, int]]:
    """(row, column) of each patch of an image, in order."""
    t, h, w = grid
    blocks = [(r, c) for r in range(0, h, merge) for c in range(0, w, merge)]
    return [(r + i, c + j) for r, c in blocks for i in range(merge) for j in range(merge)] * t


def check(batch: MicroBatch, samples: list[TokenizedSample], geometry: Geometry, seq_len: int, part: RankSlice) -> None:
    merge = geometry.spatial_merge_size
    lengths = [len(s.input_ids) for s in samples]
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + -(-length // part.pad_multiple) * part.pad_multiple)
    bounds += [seq_len] if bounds[-1] < seq_len else []
    table = [(0, (0, 0, 0), None)] * seq_len
    for sample, begin in zip(samples, bounds):
        table[begin : begin + len(sample.input_ids)] = tokens_of(sample, merge)
    held = places_of(bounds, part)
    mine = held[part.cp_rank]
    assert batch.cu_seqlens.tolist() == bounds and batch.max_seqlen == max(np.diff(bounds))
    assert batch.cp_order.tolist() == (list(chain(*held)) if part.cp > 1 else [])
    taken = {begin + i for length, begin in zip(lengths, bounds) for i in range(length)}
    assert batch.is_token.tolist() == ([place in taken for place in mine] if geometry.marks_padding else [])
    assert batch.input_ids[0].tolist() == [table[place][0] for place in mine]
    assert batch.position_ids.T.tolist() == [list(table[place][1]) for place in mine]
    learnt = [(i, table[place][2], place) for i, place in enumerate(mine) if table[place][2] is not None]
    assert list(zip(batch.loss_index.tolist(), batch.labels.tolist())) == [(i, label) for i, label, _ in learnt]
    by_sample = [sum(a <= place < b for _, _, place in learnt) for a, b in pairwise(bounds)]
    assert list(batch.loss_lengths) == by_sample[: len(samples)]
    assert batch.num_loss_tokens == sum(label is not None for _, _, label in table)
    assert batch.sample_lengths == tuple(lengths) and batch.keys == tuple(s.key for s in samples)
    assert batch.num_tokens == sum(lengths) and batch.num_slots == seq_len
    assert batch.image_patches == tuple(patches for s in samples for patches in s.image_grid_thw.prod(1).tolist())
    check_second(batch, samples, bounds, mine if geometry.predicts_second else [])
    if part.has_vision:
        held = list(chain(*held))
        check_vision(batch, samples, geometry, part, [(place, table[place][0] in (IMAGE, VIDEO)) for place in held])
    else:
        assert batch.vision_cu_seqlens.tolist() == [0] and batch.vision_max_seqlen == 0
        fields = (batch.patches, batch.image_index, batch.image_rows, batch.patch_coordinates, batch.patch_frames)
        fields += (batch.later_patches, batch.later_rows)
        assert [len(field) for field in fields] == [0] * 7 and batch.encoded_rows == batch.gathered_rows == 0


def next_place(place: int, lengths: list[int], bounds: list[int]) -> int:
    """The place of the next token of the same sample; of a last token, and of padding, the place itself."""
    return place + any(begin <= place < begin + length - 1 for length, begin in zip(lengths, bounds))


def check_second(batch: MicroBatch, samples: list[TokenizedSample], bounds: list[int], mine: list[int]) -> None:
    """`mine`: the places that a rank holds; empty if the token after the next is not predicted."""
    lengths = [len(sample.input_ids) for sample in samples]
    ids, learnt = {}, {}
    for sample, begin in zip(samples, bounds):
        for i, (token, is_learnt) in enumerate(zip(sample.input_ids.tolist(), sample.loss_mask.tolist())):
            ids[begin + i], learnt[begin + i] = token, is_learnt
    following = [next_place(place, lengths, bounds) for place in mine]
    assert batch.next_ids[0].tolist() == [ids.get(place, 0) for place in following]
    after = [next_place(place, lengths, bounds) for place in following]
    second = [(i, ids[b]) for i, (a, b) in enumerate(zip(mine, after)) if b == a + 2 and learnt[b]]
    assert list(zip(batch.second_index.tolist(), batch.second_labels.tolist())) == second


def check_vision(
    batch: MicroBatch,
    samples: list[TokenizedSample],
    geometry: Geometry,
    part: RankSlice,
    held: list[tuple[int, bool]],
) -> None:
    """`held`: each place of the bin and whether an image token is there, in the order in which ranks hold them."""
    merge = geometry.spatial_merge_size
    grids = [tuple(grid) for s in samples for grid in s.image_grid_thw.tolist()]
    counts = [t * h * w for t, h, w in grids]
    pixels = np.split(np.concatenate([np.empty((0, 12), np.uint8), *(s.patches for s in samples)]), np.cumsum(counts))
    shares = spread_images(counts, part.vision_ranks)
    chosen = shares[part.vision_rank]
    sizes = [sum(counts[image] for image in share) // merge**2 for share in shares]
    assert (batch.encoded_rows, batch.gathered_rows) == (sizes[part.vision_rank], max(sizes))
    encoded = [grids[image] for image in chosen] or [(1, merge, merge)]
    expected = [pixels[image] for image in chosen] or [np.zeros((merge * merge, 12), np.uint8)]
    assert np.array_equal(batch.patches, np.concatenate(expected))
    check_second_frames(batch, samples, chosen)
    frames = [(h, w) for t, h, w in encoded for _ in range(t)]
    per_frame = [h * w for h, w in frames]
    assert batch.vision_cu_seqlens.diff().tolist() == per_frame and batch.vision_max_seqlen == max(per_frame)
    assert batch.patch_coordinates.tolist() == [list(place) for grid in encoded for place in patches_of(grid, merge)]
    assert batch.patch_frames.tolist() == [list(frame) for frame in frames for _ in range(frame[0] * frame[1])]
    row_of = {}  # (image, its token) -> row among the gathered
    for rank, share in enumerate(shares):
        inside = [(image, token) for image in share for token in range(counts[image] // merge**2)]
        row_of |= {name: rank * max(sizes) + row for row, name in enumerate(inside)}
    names = [(image, token) for image, count in enumerate(counts) for token in range(count // merge**2)]
    name_at = dict(zip(sorted(place for place, is_image in held if is_image), names))
    size = len(held) // (part.cp * part.sequence_ranks)
    first = (part.cp_rank * part.sequence_ranks + part.sequence_rank) * size
    mine = [place for place, _ in held[first : first + size]]
    places = [(i, row_of[name_at[place]]) for i, place in enumerate(mine) if place in name_at]
    assert list(zip(batch.image_index.tolist(), batch.image_rows.tolist())) == places
    lengths, bounds = [len(s.input_ids) for s in samples], batch.cu_seqlens.tolist()
    following = [next_place(place, lengths, bounds) for place in mine] if geometry.predicts_second else []
    places = [(i, row_of[name_at[place]]) for i, place in enumerate(following) if place in name_at]
    assert list(zip(batch.next_image_index.tolist(), batch.next_image_rows.tolist())) == places


def check_second_frames(batch: MicroBatch, samples: list[TokenizedSample], chosen: list[int]) -> None:
    """`chosen`: the images of the bin that a rank encodes, groups included."""
    visuals = [(sample, number) for sample in samples for number in range(len(sample.image_grid_thw))]
    later, rows, row = [np.empty((0, 12), np.uint8)], [], 0
    for sample, number in (visuals[image] for image in chosen):
        size, before = int(sample.image_grid_thw[number].prod()), sample.image_grid_thw[:number].prod(1)
        if sample.is_video[number]:
            start = int(before[sample.is_video[:number]].sum())
            later.append(sample.later_patches[start : start + size])
            rows += range(row, row + size)
        row += size
    assert np.array_equal(batch.later_patches, np.concatenate(later)) and batch.later_rows.tolist() == rows


@pytest.mark.parametrize("seed", range(60))
def test_every_rank_of_any_bin_has_what_the_reference_says(seed):
    rng = np.random.default_rng(seed)
    flags = {"marks_padding": bool(seed % 2), "predicts_second": seed % 3 == 0}
    geometry = Geometry(IMAGE, int(rng.choice([2, 2, 3])), 12, VIDEO, **flags)
    samples = [draw_sample(rng, geometry) for _ in range(int(rng.integers(0, 8)))]
    cp, tp = int(rng.integers(1, 5)), int(rng.choice([1, 1, 2, 3]))
    pad = (2 * cp if cp > 1 else 1) * tp * int(rng.choice([1, 2]))
    unit = int(np.lcm(2 * cp * tp, pad))
    need = sum(-(-len(s.input_ids) // pad) * pad for s in samples)
    seq_len = -(-max(need, 1) // unit) * unit + unit * int(rng.choice([0, 0, 1, 3]))
    for rank in range(cp * tp):
        part = RankSlice(
            pad_multiple=pad,
            cp=cp,
            cp_rank=rank // tp,
            sequence_ranks=tp,
            sequence_rank=rank % tp,
            vision_ranks=cp * tp,
            vision_rank=rank,
            vision_shares=cp * tp,
            vision_share=rank,
            has_vision=bool(rng.random() < 0.85),
        )
        batch = make_micro_batch(samples, geometry, seq_len, part)
        check(batch, samples, geometry, seq_len, part)
        check_form(batch)


def check_form(batch: MicroBatch) -> None:
    """The model gets contiguous tensors of these dtypes."""
    tensors = batch.tensors()
    assert all(tensor.is_contiguous() for tensor in tensors.values())
    narrow = {"cu_seqlens", "vision_cu_seqlens", "patch_coordinates", "patch_frames"}
    wanted = (
        dict.fromkeys(tensors, torch.int64)
        | dict.fromkeys(narrow, torch.int32)
        | dict.fromkeys(("patches", "later_patches"), torch.uint8)
    )
    wanted |= {"is_token": torch.bool}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == wanted


@pytest.mark.parametrize("kinds", [[], [Kind(9)], [Kind(9), Kind(5)]], ids=["nothing", "a text", "two texts"])
def test_a_bin_of_text_alone_is_laid_out_like_any_other(kinds):
    geometry = Geometry(IMAGE, 2, 12)
    samples = [make_sample(kind, geometry, range(20, 90), seed) for seed, kind in enumerate(kinds)]
    check(make_micro_batch(samples, geometry, 16), samples, geometry, 16, RankSlice())


MUTATIONS = {
    "the label of the place itself": lambda b: {"labels": b.input_ids[0, b.loss_index]},
    "the label after the next": lambda b: {"labels": b.input_ids[0, b.loss_index + 2]},
    "losses one place late": lambda b: {"loss_index": b.loss_index + 1},
    "losses and labels one place late": lambda b: {
        "loss_index": b.loss_index + 1,
        "labels": b.input_ids[0, b.loss_index + 2],
    },
    "losses one place early": lambda b: {"loss_index": b.loss_index - 1},
    "a loss too few": lambda b: {"loss_index": b.loss_index[:-1], "labels": b.labels[:-1]},
    "a loss of another sample": lambda b: {"loss_lengths": (b.loss_lengths[0] + 1, b.loss_lengths[1] - 1)},
    "positions from 1": lambda b: {"position_ids": b.position_ids + 1},
    "positions one place late": lambda b: {"position_ids": b.position_ids.roll(1, 1)},
    "positions that go on over samples": lambda b: {"position_ids": torch.arange(b.num_slots).expand(3, -1)},
    "rows and columns exchanged": lambda b: {"position_ids": b.position_ids[[0, 2, 1]]},
    "text goes on after the image's tokens": lambda b: {
        "position_ids": torch.cat([torch.arange(n) for n in (*b.sample_lengths, 0)]).expand(3, -1)
    },
    "a segment too long": lambda b: {"cu_seqlens": b.cu_seqlens + torch.tensor([0, 1, 0, 0], dtype=torch.int32)},
    "tokens one place late": lambda b: {"input_ids": b.input_ids.roll(1, 1)},
    "padding one place early": lambda b: {"is_token": b.is_token.roll(-1)},
    "image tokens one place early": lambda b: {"image_index": b.image_index - 1},
    "rows of another image token": lambda b: {"image_rows": b.image_rows.roll(1)},
    "patches of another image": lambda b: {"patches": b.patches.roll(4, 0)},
    "second frames of another group": lambda b: {"later_patches": b.later_patches.roll(4, 0)},
    "second frames with another patch's weights": lambda b: {"later_rows": b.later_rows - 1},
    "no second frames": lambda b: {"later_patches": b.later_patches[:0], "later_rows": b.later_rows[:0]},
    "patches row by row": lambda b: {"patch_coordinates": b.patch_coordinates.sort(0).values},
    "frames turned": lambda b: {"patch_frames": b.patch_frames.flip(1)},
    "the token itself as the next": lambda b: {"next_ids": b.input_ids},
    "the next sample's first token as the next": lambda b: {"next_ids": b.input_ids.roll(-1, 1)},
    "the next sample's first token as the second": lambda b: {
        "second_index": torch.cat([b.second_index, b.loss_index[b.loss_lengths[0] - 1 :][:1]]).sort().values,
        "second_labels": torch.cat([b.second_labels, b.second_labels[-1:]]),
    },
    "the next token as the second": lambda b: {"second_labels": b.next_ids[0, b.second_index]},
    "the image token itself as the next": lambda b: {"next_image_index": b.image_index},
    "rows of the image token itself": lambda b: {"next_image_rows": b.next_image_rows.roll(1)},
    "frames that see each other": lambda b: {"vision_cu_seqlens": b.vision_cu_seqlens[[0, -1]]},
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_batch_that_is_off_by_one_fails_the_check(name):
    geometry = Geometry(IMAGE, 2, 12, VIDEO, marks_padding=True, predicts_second=True)
    kinds = [Kind(9, ((1, 4, 6), (1, 2, 4)), 0.9, ((2, 2, 4),)), Kind(6, learnt=0.9)]
    samples = [make_sample(kind, geometry, range(20, 90), seed) for seed, kind in enumerate(kinds)]
    seq_len = sum(len(s.input_ids) for s in samples) + 3
    batch = make_micro_batch(samples, geometry, seq_len)
    check(batch, samples, geometry, seq_len, RankSlice())
    with pytest.raises(AssertionError):
        check(dataclasses.replace(batch, **MUTATIONS[name](batch)), samples, geometry, seq_len, RankSlice())
