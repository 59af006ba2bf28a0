"""Adapters beside a base in float8: every layout trains as one process does, and as beside the rounded weights."""

import functools
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.equivalence.test_layouts import (
    DEALT,
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
from tests.helpers.run_dir import make_bins, metrics_of, model_dir, write_job
from tests.helpers.world import exported, run_world
from trainer.checkpoint.directory import list_checkpoints
from trainer.contract.adapter import AdapterConfig
from trainer.contract.names import ADAPTER_EXPORT, CHECKPOINTS, HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.parallel import ParallelConfig
from trainer.contract.peft import ADAPTER_WEIGHTS
from trainer.contract.result import read_heldout
from trainer.contract.run import RunConfig
from trainer.layers.float8_base import pack, unpack
from trainer.model.registry import read_model
from trainer.model.rules import stored_rules

pytestmark = pytest.mark.promise(
    "Adapters train in every layout as in one process, to 2e-6, also with dropout in recomputed layers and beside "
    "a base in float8, there to the bit as beside the rounded weights; the base keeps its bits."
)

# name -> (layout, processes, shape, kind)
LAYOUTS = {
    "full-recompute": (FULL, 1, "first", "dora"),
    "dp2": ({}, 2, "first", "lora"),
    "tp2": ({"tp": 2}, 2, "first", "dora"),
    "tp2-sp": ({"tp": 2, **SP}, 2, "first", "lora"),
    "tp2-sp-full": ({"tp": 2, **SP, **FULL}, 2, "first", "dora"),
    "tp4-sp": ({"tp": 4, **SP}, 4, "wide", "lora"),
    "pp2": ({"pp": 2}, 2, "first", "lora"),
    "pp2-vpp2": ({"pp": 2, "vpp": 2}, 2, "deep", "lora"),
    "pp2-dealt": ({"pp": 2, **DEALT}, 2, "first", "lora"),
    "own-1+1": (own(1), 2, "first", "lora"),
    "cp2": ({"cp": 2}, 2, "first", "lora"),
    "text-tp2-sp": ({"tp": 2, **SP}, 2, "text-second", "dora"),
    "hybrid-tp2-selective": ({"tp": 2, **SELECTIVE}, 2, "hybrid-first", "lora"),
    "hybrid-tp2-sp": ({"tp": 2, **SP}, 2, "hybrid-second", "dora"),
    "hybrid-pp2": ({"pp": 2}, 2, "hybrid-first", "lora"),
    "hybrid-cp2": ({"cp": 2}, 2, "hybrid-first", "lora"),
    "experts-ep2-dp2": ({"ep": 2}, 2, "experts-shared", "lora"),
}


# Adapters of every matrix of the language model, and of vision where there is one.
TARGETS = (r"(model\.(language_model\.)?layers|model\.visual)\..*",)


def job(directory, name: str, shape: str, kind: str, base: str = "float8", **changes: object) -> RunConfig:
    """Five steps of a training."""
    run = write_job(
        directory,
        num_steps=STEPS,
        shape=shape,
        bins=make_bins(shape, kinds_of(shape)),
        global_batch_size=4,
        optim=SMOOTH.model_copy(update={"lr": 1e-2}),
        name=name,
        **changes,
    )
    rank = 8 if shape.startswith("experts-") else 4
    adapter = AdapterConfig(kind=kind, rank=rank, alpha=2 * rank, base=base, targets=TARGETS)
    train = run.train.model_copy(update={"adapter": adapter})
    return run.model_copy(update={"seq_len": SEQ_LEN, "train": train})


def adapters_of(run: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(run.output_dir / ADAPTER_EXPORT / ADAPTER_WEIGHTS)


def outcome_of(run: RunConfig, processes: int) -> Outcome:
    world = run_world(run, processes)
    heldout, before = (read_heldout(run.output_dir / name) for name in (HELDOUT_JSONL, HELDOUT_BASE_JSONL))
    return Outcome(world, exported(run), heldout, before)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a layout once; the data of a shape are written once."""
    root = functools.cache(tmp_path_factory.mktemp)

    @functools.cache
    def run_layout(name: str, shape: str, kind: str) -> tuple[Outcome, dict[str, torch.Tensor]]:
        layout, processes, _, _ = LAYOUTS.get(name, ({}, 1, shape, kind))
        run = job(root(shape), f"{name}-{kind}", shape, kind, parallel=ParallelConfig(**layout))
        return outcome_of(run, processes), adapters_of(run)

    return run_layout


def assert_close(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=2e-6, msg=lambda text, k=key: f"{k}: {text}")


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process_does(name, trained):
    _, _, shape, kind = LAYOUTS[name]
    (ours, adapters), (alone, expected) = trained(name, shape, kind), trained("alone", shape, kind)
    compare_steps(ours, alone)
    assert_close(adapters, expected)
    assert all(rank["drift"] == 0.0 for rank in ours.world.ranks)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "kind"), [("first", "lora"), ("hybrid-first", "dora"), ("experts-shared", "lora")])
def test_it_is_the_training_beside_the_rounded_weights(shape, kind, tmp_path):
    """Bit for bit: the rounding is all that float8 changes. And it changes something."""
    rounded = tmp_path / "rounded"
    shutil.copytree(model_dir(shape), rounded)
    weights = load_file(rounded / "model.safetensors")
    family, read = read_model(rounded)
    linear = {rule.ours for rule in family.weight_rules(read) if rule.sizes}
    for rule in stored_rules(family.weight_rules(read), weights):
        if rule.ours.startswith("language.") and rule.ours in linear:
            weights |= {name: unpack(*pack(weights[name]), weights[name].dtype) for name in rule.hf}
    save_file(weights, rounded / "model.safetensors", metadata={"format": "pt"})
    runs = {
        "float8": job(tmp_path, "float8", shape, kind),
        "rounded": job(tmp_path, "rounded-run", shape, kind, "train_precision").model_copy(update={"hf_dir": rounded}),
        "whole": job(tmp_path, "whole", shape, kind, "train_precision"),
    }
    losses, adapters = {}, {}
    for name, run in runs.items():
        run_world(run, 1)
        losses[name], adapters[name] = [(row.loss, row.heldout_loss) for row in metrics_of(run)], adapters_of(run)
    assert losses["float8"] == losses["rounded"] != losses["whole"]
    for key, adapter in adapters["float8"].items():
        assert torch.equal(adapter, adapters["rounded"][key]), key
    for (ours, _), (whole, _) in zip(losses["float8"], losses["whole"], strict=True):
        assert ours == pytest.approx(whole, rel=0.01)


@pytest.mark.full
def test_it_resumes_and_is_exported_with_the_weights_that_were_given(tmp_path):
    """Checkpoints hold no base; adapters are merged into the weights of `hf_dir`, not into the rounded ones."""
    run = job(tmp_path, "run", "first", "lora", save_interval=3)
    run_world(run, 1, save=True)
    rows, adapters = [row.loss for row in metrics_of(run)], adapters_of(run)
    shutil.rmtree(list_checkpoints(run.output_dir / CHECKPOINTS)[-1])
    run_world(run, 1, save=True)
    assert [row.loss for row in metrics_of(run)] == rows
    newest = list_checkpoints(run.output_dir / CHECKPOINTS)[-1]
    assert sum(path.stat().st_size for path in newest.rglob("*")) < (run.hf_dir / "model.safetensors").stat().st_size
    export = run.model_copy(update={"task": "export", "checkpoint_dir": newest, "output_dir": tmp_path / "export"})
    export.output_dir.mkdir()
    run_world(export, 1)
    assert_close(adapters_of(export), adapters)
    base, config = load_file(run.hf_dir / "model.safetensors"), run.train.adapter
    for name, weight in exported(export).items():
        a, b = (adapters.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight") for part in "AB")
        if a is None:
            assert torch.equal(weight, base[name]), name
        else:
            torch.testing.assert_close(weight, base[name] + config.scaling * b @ a, rtol=0, atol=1e-6)
