"""Low-rank adapters train in every layout as in one process, and leave the base as it was; beside a base in float8 too,
where the training is the one beside the rounded weights."""

import functools
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.equivalence import test_layouts
from tests.equivalence.test_layouts import FULL, SMOOTH, SP, Outcome, assert_close, compare_steps, job, outcome_of
from tests.helpers.adapters import job_with
from tests.helpers.run_dir import changed, metrics_of, model_dir
from tests.helpers.tiers import full
from tests.helpers.world import exported, run_world
from trainer.checkpoint.directory import list_checkpoints
from trainer.contract.adapter import ROLES, AdapterConfig
from trainer.contract.names import ADAPTER_EXPORT, CHECKPOINTS
from trainer.contract.peft import ADAPTER_WEIGHTS
from trainer.contract.run import CheckpointConfig, RunConfig
from trainer.layers.float8_base import pack, unpack
from trainer.model.registry import read_model
from trainer.model.rules import stored_rules

pytestmark = pytest.mark.promise(
    "Adapters train in every layout as in one process, to 2e-6, also with dropout in recomputed layers and beside "
    "a base in float8, there to the bit as beside the rounded weights; the base keeps its bits."
)

LAYOUTS = test_layouts.LAYOUTS | {
    "tp2-sp-vision-full": ({"tp": 2, **SP, **test_layouts.CUT_VISION, **FULL}, 2, "first"),
    "experts-ep2-tp2-sp-dp2-full": ({"ep": 2, "tp": 2, **SP, **FULL}, 4, "experts-shared"),
}
# (base, kind) -> layouts
TRAINED = {
    ("train_precision", "lora"): (
        *("full-recompute", "dp2", "tp2", "tp2-vision", "tp2-sp", "pp2", "pp2-vpp2", "pp2-dealt", "own-1+2-pp2", "cp2"),
        *("text-tp2-sp", "hybrid-full", "hybrid-dp2", "hybrid-tp2-sp-full", "hybrid-cp2"),
        *("experts-ep2-dp2", "experts-ep2-pp2", "experts-ep2-tp2-sp-dp2-full"),
    ),
    ("train_precision", "dora"): (
        *("tp2-selective", "tp2-sp-vision-full", "pp2-uneven", "own-1+1", "tp2-cp2", "tp2-sp-pp2-full", "tp4-sp"),
        *("hybrid-tp2", "hybrid-pp2-dealt", "hybrid-tp2-sp-cp2", "fourfold"),
    ),
    ("float8", "lora"): (
        *("dp2", "tp2-sp", "tp4-sp", "pp2", "pp2-vpp2", "pp2-dealt", "own-1+1", "cp2"),
        *("hybrid-tp2-selective", "hybrid-pp2", "hybrid-cp2", "experts-ep2-dp2"),
    ),
    ("float8", "dora"): ("full-recompute", "tp2", "tp2-sp-full", "text-tp2-sp", "hybrid-tp2-sp-full"),
}
# Beside float8: adapters of every matrix of the language model, and of vision where there is one.
EVERYWHERE = (r"(model\.(language_model\.)?layers|model\.visual)\..*",)


def targets_of(shape: str) -> tuple[str, ...]:
    """Every role that the model has."""
    absent = {"merger", "vision"} if shape.startswith("text-") else set()
    absent |= set() if shape.startswith("experts-") else {"experts"}
    return tuple(role for role in ROLES if role not in absent and (role != "delta" or shape.startswith("hybrid-")))


def adapter_job(
    root, name: str, shape: str, kind: str, base: str, *, layout: dict | None = None, dropout: float = 0
) -> RunConfig:
    rank = 8 if shape.startswith("experts-") else 4
    targets = EVERYWHERE if base == "float8" else targets_of(shape)
    adapter = AdapterConfig(kind=kind, rank=rank, alpha=2 * rank, dropout=dropout, base=base, targets=targets)
    optim = SMOOTH.model_copy(update={"lr": 1e-2})
    return job_with(job(root, name, shape, layout or {}, optim=optim), adapter)


def adapters_of(run: RunConfig) -> dict[str, torch.Tensor]:
    return load_file(run.output_dir / ADAPTER_EXPORT / ADAPTER_WEIGHTS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a layout once; the data of a shape are written once."""
    root = functools.cache(tmp_path_factory.mktemp)

    @functools.cache
    def run_layout(
        name: str, shape: str, kind: str, base: str, dropout: float
    ) -> tuple[Outcome, dict[str, torch.Tensor]]:
        layout, processes, _ = LAYOUTS.get(name, ({}, 1, shape))
        called = f"{name}-{kind}-{base}-{dropout}"
        run = adapter_job(root(shape), called, shape, kind, base, layout=layout, dropout=dropout)
        return outcome_of(run, processes), adapters_of(run)

    # The cache takes a default that is given for another call, and would train again in the same directory.
    return lambda name, shape, kind, base="train_precision", dropout=0.0: run_layout(name, shape, kind, base, dropout)


@pytest.mark.full
@pytest.mark.parametrize(
    ("base", "kind", "name"), [(*how, name) for how, layouts in TRAINED.items() for name in layouts]
)
def test_a_layout_trains_as_one_process_does(base, kind, name, trained):
    shape = LAYOUTS[name][2]
    (ours, adapters), (alone, expected) = (trained(layout, shape, kind, base) for layout in (name, "alone"))
    compare_steps(ours, alone)
    assert_close(adapters, expected)
    assert all(rank["drift"] == 0.0 for rank in ours.world.ranks), "copies of an adapter differ"


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
    (ours, adapters), (alone, expected) = (trained(layout, shape, "lora", dropout=0.3) for layout in (name, "alone"))
    compare_steps(ours, alone)
    assert_close(adapters, expected)
    without = trained("alone", shape, "lora")[0]
    assert [row.loss for row in alone.world.rows[1:]] != [row.loss for row in without.world.rows[1:]]
    assert alone.before == without.before, "dropout is for training alone"


@pytest.mark.full
@pytest.mark.parametrize(("shape", "kind"), [("first", "lora"), ("hybrid-first", "dora"), ("experts-shared", "lora")])
def test_beside_float8_it_is_the_training_beside_the_rounded_weights(shape, kind, tmp_path):
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
    float8 = adapter_job(tmp_path, "float8", shape, kind, "float8")
    adapter = float8.train.adapter.model_copy(update={"base": "train_precision"})
    whole = job_with(float8, adapter, output_dir=tmp_path / "whole")
    runs = {"float8": float8, "whole": whole}
    runs["rounded"] = whole.model_copy(update={"output_dir": tmp_path / "rounded-run", "hf_dir": rounded})
    losses, adapters = {}, {}
    for name, run in runs.items():
        run.output_dir.mkdir(exist_ok=True)
        run_world(run, 1)
        losses[name], adapters[name] = [(row.loss, row.heldout_loss) for row in metrics_of(run)], adapters_of(run)
    assert losses["float8"] == losses["rounded"] != losses["whole"]
    for key, adapter in adapters["float8"].items():
        assert torch.equal(adapter, adapters["rounded"][key]), key
    for (ours, _), (whole, _) in zip(losses["float8"], losses["whole"], strict=True):
        assert ours == pytest.approx(whole, rel=0.01)


@pytest.mark.full
def test_beside_float8_it_resumes_and_is_exported_with_the_weights_that_were_given(tmp_path):
    """Checkpoints hold no base; adapters are merged into the weights of `hf_dir`, not into the rounded ones."""
    run = adapter_job(tmp_path, "run", "first", "lora", "float8")
    run = changed(run, checkpoint=CheckpointConfig(save_interval=3, keep_last=2))
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
