"""The drawings of docs/layouts.md are what the trainer does today, and the page names what is drawn and tested."""

import contextlib
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.equivalence import test_layouts
from tests.helpers.draw_layouts import PICTURES, draw
from tests.helpers.layout_parts import (
    GEOMETRY,
    LAYOUTS,
    QWEN_2B,
    SEQ_LEN,
    Part,
    gathered_images,
    make_bin,
    mesh_on_paper,
    parts_of,
)
from trainer.contract.parallel import ParallelConfig
from trainer.data.micro_batch import make_micro_batch
from trainer.data.slices import RankSlice
from trainer.libraries.megatron_private import CpuMode, patch_cuda
from trainer.parallel import mesh as distributed
from trainer.parallel.mesh import Mesh, rank_mesh

PAGE = (Path(__file__).parents[3] / "docs/layouts.md").read_text(encoding="utf-8")
FOURFOLD = ParallelConfig(tp=2, pp=2, cp=2, sequence_parallel=True)
# What is not drawn is checked all the same: data parallel beside the rest, four context-parallel ranks.
CHECKED = {name: (layout.parallel, layout.ranks) for name, layout in LAYOUTS.items()} | {
    "fourfold-dp2": (FOURFOLD, 16),
    "cp4": (ParallelConfig(cp=4), 4),
    "pp4-dealt": (ParallelConfig(pp=4, vision="dealt"), 4),
    "fourfold-dealt": (ParallelConfig(tp=2, pp=2, cp=2, sequence_parallel=True, vision="dealt"), 8),
}


@functools.cache
def checked(name: str) -> list[list[Part]]:
    """The parts of all ranks of a layout, by data-parallel and pipeline rank: those who share a bin's tokens."""
    groups: dict[tuple[int, int], list[Part]] = {}
    for part in parts_of(*CHECKED[name], make_bin(0)):
        groups.setdefault((part.mesh.dp_rank, part.mesh.groups.pp.rank()), []).append(part)
    return list(groups.values())


@functools.cache
def whole(pad_multiple: int):
    return make_micro_batch(make_bin(0), GEOMETRY, SEQ_LEN, RankSlice(pad_multiple=pad_multiple))


def once(places: list[np.ndarray], count: int) -> bool:
    """Whether these are all the places of `count`, each once."""
    return sorted(np.concatenate(places).tolist()) == list(range(count))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_picture_is_what_the_code_draws_today(name):
    assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == draw(name), (
        "run `python -m tests.helpers.draw_layouts`, look at the pictures, and at what docs/layouts.md says of them"
    )


def test_the_page_has_a_row_a_section_and_a_picture_for_each_layout():
    table = PAGE.partition("\n## What each layout divides\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == [*LAYOUTS, "fsdp"]
    pictures = dict(re.findall(r"^## `([\w-]+)`.*\n\n!\[.+\]\(pictures/layouts/([\w-]+)\.svg\)", PAGE, re.MULTILINE))
    assert pictures == {name: name for name in LAYOUTS}
    assert "\n## `fsdp`" in PAGE
    assert {path.name for path in PICTURES.iterdir()} == {f"{name}.svg" for name in LAYOUTS}


def test_the_page_names_tests_that_exist():
    shown = re.findall(r"^Shown by: (.+?)(?:\n\n|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    named = [name for paragraph in shown for name in re.findall(r"`(.+?)`", paragraph)]
    tests = Path(test_layouts.__file__).parents[1]
    for name in named:
        if name.endswith(".py"):
            assert (tests / name.removeprefix("tests/")).is_file(), name
        elif name.startswith("test_"):
            assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in tests.rglob("test_*.py")), name
        else:
            assert name in test_layouts.LAYOUTS, name
    assert len(named) > len(LAYOUTS)


def test_the_layouts_of_the_same_name_are_the_tested_ones():
    same = LAYOUTS.keys() & test_layouts.LAYOUTS.keys()
    assert len(same) >= 6
    for name in same:
        settings, processes, _ = test_layouts.LAYOUTS[name]
        assert (ParallelConfig(**settings), processes) == (LAYOUTS[name].parallel, LAYOUTS[name].ranks)


@contextlib.contextmanager
def real_mesh(parallel: ParallelConfig, rank: int, ranks: int) -> Iterator[Mesh]:
    """The trainer's own mesh of one rank of many, by a backend that sends nothing."""

    def join(rank: int, world: int, backend: str) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    mode = contextlib.nullcontext()
    if not torch.cuda.is_available():
        patch_cuda()
        mode = CpuMode()
    build = parallel_state.initialize_model_parallel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_join", join)
        patch.setattr(distributed, "watched", lambda *_: contextlib.nullcontext())
        patch.setattr(distributed, "place_in_world", lambda: (rank, 0, ranks))
        # gloo's groups would connect
        patch.setattr(
            parallel_state,
            "initialize_model_parallel",
            lambda *sizes, **named: build(*sizes, **{**named, "create_gloo_process_groups": False}),
        )
        with mode, rank_mesh(parallel, seed=0) as mesh:
            yield mesh


@pytest.mark.parametrize("name", CHECKED)
def test_the_mesh_on_paper_is_the_trainers(name):
    parallel, ranks = CHECKED[name]
    for rank in range(ranks):
        paper = mesh_on_paper(parallel, rank, ranks)
        with real_mesh(parallel, rank, ranks) as mesh:
            assert (mesh.dp_rank, mesh.dp) == (paper.dp_rank, paper.dp)
            assert mesh.slice_of_bin(parallel) == paper.slice_of_bin(parallel)
            for name in ("tp", "cp", "pp", "dp", "tp_cp"):
                ours, theirs = getattr(paper.groups, name), getattr(mesh.groups, name)
                assert [*ours.ranks] == dist.get_process_group_ranks(theirs)


@pytest.mark.parametrize("name", CHECKED)
def test_each_token_is_held_by_one_context_parallel_rank_and_sequence_parallel_ranks_divide_them(name):
    for parts in checked(name):
        for tp_rank in range(parts[0].mesh.groups.tp.size()):
            ranks = [part for part in parts if part.mesh.groups.tp.rank() == tp_rank]
            assert once([part.tokens for part in ranks], SEQ_LEN)
            assert sum(len(part.batch.loss_index) for part in ranks) == ranks[0].batch.num_loss_tokens
        for part in parts:
            same = [p for p in parts if p.mesh.groups.cp.rank() == part.mesh.groups.cp.rank()]
            streams = [p.stream for p in same] if CHECKED[name][0].sequence_parallel else [part.stream]
            assert np.array_equal(np.concatenate(streams), part.tokens)


@pytest.mark.parametrize("name", CHECKED)
def test_each_image_is_encoded_once_and_its_tokens_find_their_places(name):
    by_rank = {part.mesh.rank: part for parts in checked(name) for part in parts}
    for parts in checked(name):
        if parts[0].mesh.groups.pp.rank() > 0:
            if not CHECKED[name][0].deals_vision:
                assert all(not part.images and not len(part.batch.image_index) for part in parts)
            continue
        images = parts[0].batch.image_patches
        tokens = [(i, t) for i, n in enumerate(images) for t in range(n // GEOMETRY.spatial_merge_size**2)]
        bin_ = whole(CHECKED[name][0].pad_multiple)
        expected = dict(zip(bin_.image_index.tolist(), tokens, strict=True))
        for part in parts:
            firsts = [by_rank[rank] for rank in part.encoders.ranks]
            sharers = [by_rank[rank] for first in firsts for rank in first.stages.ranks]
            assert sorted(i for p in sharers for i in p.images if i is not None) == list(range(len(images)))
            gathered = gathered_images(by_rank, part)
            places = part.stream[part.batch.image_index.numpy()].tolist()
            assert [gathered[row] for row in part.batch.image_rows.tolist()] == [expected[place] for place in places]
            assert set(places) == set(bin_.image_index.tolist()) & set(part.stream.tolist())


@pytest.mark.parametrize("name", CHECKED)
def test_each_layer_is_on_one_pipeline_rank(name):
    parts = [part for parts in checked(name) for part in parts]
    line = [part for part in parts if part.mesh.rank in parts[0].mesh.groups.pp.ranks]
    layers = [layer for part in line for chunk in part.chunks for layer in chunk]
    assert sorted(layers) == list(range(QWEN_2B.language.num_layers))
    assert [part.has_loss for part in line] == [False] * (len(line) - 1) + [True]


def test_the_drawings_show_what_they_are_for():
    """Else a picture would hide what its section explains."""
    cp2, tp2_sp, four = (parts_of(*CHECKED[name], make_bin(0)) for name in ("cp2", "tp2-sp", "tp2-sp-cp2"))
    padded = np.diff(cp2[0].batch.cu_seqlens)[: len(cp2[0].batch.keys)]
    assert any(length > own for length, own in zip(padded, cp2[0].batch.sample_lengths)), "no sample that cp pads"
    assert None in gathered_images(cp2, cp2[0]), "no filling"
    assert any(part.images == [None] for part in four), "no rank with a blank image"
    dealt = parts_of(*CHECKED["pp2-dealt"], make_bin(0))
    assert all(part.images and None not in part.images for part in dealt), "a rank that encodes nothing"
    rows = [set(part.batch.image_rows.tolist()) for part in tp2_sp]
    gathered = gathered_images(tp2_sp, tp2_sp[0])
    image_of = [{gathered[row][0] for row in found} for found in rows]
    assert image_of[0] & image_of[1], "no image whose tokens lie on two ranks"
