"""Low-rank adapters train in every layout as in one process, and leave the base as it was."""

import functools

import pytest
import torch
from safetensors.torch import load_file

from tests.equivalence.test_layouts import (
    DEALT,
    FOURFOLD,
    FULL,
    SELECTIVE,
    SEQ_LEN,
    SMOOTH,
    SP,
    STEPS,
    Outcome,
    compare_steps,
    kinds_of,
    own,
)
from tests.helpers.run_dir import make_bins, model_dir, write_job
from tests.helpers.tiers import full
from tests.helpers.world import exported, run_world
from trainer.contract.adapter import ROLES, AdapterConfig
from trainer.contract.names import ADAPTER_EXPORT, HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.parallel import ParallelConfig
from trainer.contract.peft import ADAPTER_WEIGHTS
from trainer.contract.result import read_heldout

pytestmark = pytest.mark.promise(
    "Adapters train in every layout as in one process, to 2e-6, also with dropout in recomputed layers and beside "
    "a base in float8, there to the bit as beside the rounded weights; the base keeps its bits."
)

CUT_VISION = {"vision_split": "tensor_parallel"}
# name -> (layout, processes, shape, kind)
LAYOUTS = {
    "full-recompute": (FULL, 1, "first", "lora"),
    "dp2": ({}, 2, "first", "lora"),
    "tp2": ({"tp": 2}, 2, "first", "lora"),
    "tp2-selective": ({"tp": 2, **SELECTIVE}, 2, "first", "dora"),
    "tp2-vision": ({"tp": 2, **CUT_VISION}, 2, "first", "lora"),
    "tp2-sp": ({"tp": 2, **SP}, 2, "first", "lora"),
    "tp2-sp-vision-full": ({"tp": 2, **SP, **CUT_VISION, **FULL}, 2, "first", "dora"),
    "pp2": ({"pp": 2}, 2, "first", "lora"),
    "pp2-vpp2": ({"pp": 2, "vpp": 2}, 2, "deep", "lora"),
    "pp2-dealt": ({"pp": 2, **DEALT}, 2, "first", "lora"),
    "pp2-untied": ({"pp": 2}, 2, "second", "dora"),
    "own-1+1": (own(1), 2, "first", "dora"),
    "own-1+2-pp2": ({"pp": 2, **own(1)}, 3, "first", "lora"),
    "cp2": ({"cp": 2}, 2, "first", "lora"),
    "tp2-cp2": ({"tp": 2, "cp": 2}, 4, "first", "dora"),
    "tp2-sp-pp2": ({"tp": 2, "pp": 2, **SP}, 4, "first", "dora"),
    "tp4-sp": ({"tp": 4, **SP}, 4, "wide", "dora"),
    "text-tp2-sp": ({"tp": 2, **SP}, 2, "text-second", "lora"),
    "hybrid-full": (FULL, 1, "hybrid-first", "lora"),
    "hybrid-dp2": ({}, 2, "hybrid-first", "lora"),
    "hybrid-tp2": ({"tp": 2}, 2, "hybrid-first", "dora"),
    "hybrid-tp2-sp": ({"tp": 2, **SP}, 2, "hybrid-second", "lora"),
    "hybrid-pp2-dealt": ({"pp": 2, **DEALT}, 2, "hybrid-first", "dora"),
    "hybrid-cp2": ({"cp": 2}, 2, "hybrid-first", "lora"),
    "hybrid-tp2-sp-cp2": ({"tp": 2, "cp": 2, **SP, **FULL}, 4, "hybrid-deep", "dora"),
    "experts-ep2-dp2": ({"ep": 2}, 2, "experts-shared", "lora"),
    "experts-ep2-pp2": ({"ep": 2, "pp": 2}, 4, "experts-listed", "lora"),
    "experts-ep2-tp2-sp-dp2": ({"ep": 2, "tp": 2, **SP, **FULL}, 4, "experts-shared", "lora"),
    "fourfold": (FOURFOLD, 16, "first", "dora"),
}


def targets_of(shape: str) -> tuple[str, ...]:
    """Every role that the model has."""
    absent = {"merger", "vision"} if shape.startswith("text-") else set()
    absent |= set() if shape.startswith("experts-") else {"experts"}
    return tuple(role for role in ROLES if role not in absent and (role != "delta" or shape.startswith("hybrid-")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a layout once; the data of a shape are written once."""

    @functools.cache
    def root(shape: str):
        return tmp_path_factory.mktemp(shape), make_bins(shape, kinds_of(shape))

    @functools.cache
    def run_layout(name: str, shape: str, kind: str, dropout: float = 0) -> tuple[Outcome, dict[str, torch.Tensor]]:
        layout, processes, _, _ = LAYOUTS.get(name, ({}, 1, shape, kind))
        directory, bins = root(shape)
        run = write_job(
            directory,
            num_steps=STEPS,
            shape=shape,
            bins=bins,
            global_batch_size=4,
            parallel=ParallelConfig(**layout),
            optim=SMOOTH.model_copy(update={"lr": 1e-2}),
            name=f"{name}-{kind}-{dropout}",
        )
        rank = 8 if shape.startswith("experts-") else 4
        adapter = AdapterConfig(kind=kind, rank=rank, alpha=2 * rank, dropout=dropout, targets=targets_of(shape))
        train = run.train.model_copy(update={"adapter": adapter})
        run = run.model_copy(update={"seq_len": SEQ_LEN, "train": train})
        world = run_world(run, processes)
        heldout, before = (read_heldout(run.output_dir / name) for name in (HELDOUT_JSONL, HELDOUT_BASE_JSONL))
        adapters = load_file(run.output_dir / ADAPTER_EXPORT / ADAPTER_WEIGHTS)
        return Outcome(world, exported(run), heldout, before), adapters

    return run_layout


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process_does(name, trained):
    _, _, shape, kind = LAYOUTS[name]
    (ours, adapters), (alone, expected) = trained(name, shape, kind), trained("alone", shape, kind)
    compare_steps(ours, alone)
    assert adapters.keys() == expected.keys()
    for key, adapter in adapters.items():
        torch.testing.assert_close(adapter, expected[key], rtol=0, atol=2e-6, msg=lambda text, k=key: f"{k}: {text}")


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_copies_of_an_adapter_stay_identical(name, trained):
    _, _, shape, kind = LAYOUTS[name]
    assert all(rank["drift"] == 0.0 for rank in trained(name, shape, kind)[0].world.ranks)


@pytest.mark.parametrize(("shape", "kind"), [full("first", "lora"), ("first", "dora"), ("hybrid-first", "lora")])
def test_every_adapter_moves_and_the_rest_is_the_base(shape, kind, trained):
    outcome, adapters = trained("alone", shape, kind)
    assert all(float(adapter.abs().max()) > 0 for adapter in adapters.values()), "an adapter that was never trained"
    base = load_file(model_dir(shape) / "model.safetensors")
    adapted = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] + ".weight" for name in adapters}
    same = {name for name, weight in outcome.weights.items() if torch.equal(weight, base[name])}
    assert same == outcome.weights.keys() - adapted
    assert sum(row.loss or 0 for row in outcome.heldout) < sum(row.loss or 0 for row in outcome.before)


@pytest.mark.full
@pytest.mark.parametrize(("name", "shape"), [("full-recompute", "first"), ("hybrid-full", "hybrid-first")])
def test_what_is_computed_again_drops_the_same(name, shape, trained):
    (ours, adapters), (alone, expected) = trained(name, shape, "lora", 0.3), trained("alone", shape, "lora", 0.3)
    compare_steps(ours, alone)
    for key, adapter in adapters.items():
        torch.testing.assert_close(adapter, expected[key], rtol=0, atol=2e-6)
    without = trained("alone", shape, "lora")[0]
    assert [row.loss for row in alone.world.rows[1:]] != [row.loss for row in without.world.rows[1:]]
    assert alone.before == without.before, "dropout is for training alone"
