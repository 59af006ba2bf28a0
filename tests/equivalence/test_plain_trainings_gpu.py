"""Trainings on one GPU with the plain modules: each way to train them within bf16's error of the same training with
the modules of older GPUs, which use no kernel of ours, and of Transformer Engine's where it is installed."""

import pytest

from tests.equivalence.test_layouts_gpu import YARDSTICKS, distance, job, yardstick_of
from tests.helpers.gpu_world import run_worlds
from tests.helpers.hardware import requires_engine, requires_gpus
from tests.helpers.run_dir import OPTIM, changed
from tests.helpers.world import World
from trainer.contract.adapter import AdapterConfig
from trainer.contract.run import RunConfig

pytestmark = pytest.mark.promise(
    "On GPUs each set of modules differs from float32, and each layout from one GPU, at most twice as much as "
    "transformers' bfloat16 from its float32."
)

LORA = {"adapter": AdapterConfig(rank=4, alpha=8)}
FLOAT8 = {"adapter": AdapterConfig(rank=4, alpha=8, base="float8")}
DORA = {"adapter": AdapterConfig(kind="dora", rank=4, alpha=8)}
# Layout, model, what of the training differs.
CASES = {
    "all": ({}, "first", {}),
    "recompute": ({"recompute": "full"}, "first", {}),
    "fsdp": ({"sharding": "fsdp"}, "first", {}),
    "lora": ({}, "first", LORA),
    "dora": ({}, "first", DORA),
    "lora beside float8": ({}, "first", FLOAT8),
    "delta": ({}, "hybrid-third", {}),
    "delta fsdp": ({"sharding": "fsdp"}, "hybrid-third", {}),
    "delta lora beside float8": ({}, "hybrid-third", FLOAT8),
}


def run_of(root, name: str, modules: str) -> RunConfig:
    layout, shape, train = CASES[name]
    run = job(root, f"{name}-{modules}".replace(" ", "-"), layout, shape)
    return changed(run, train=run.train.model_copy(update=train), modules=modules)


def check(first: str, second: str, root, names: list[str]) -> None:
    """The losses of both trainings within bf16's error, and the norms of what is trained without adapters."""
    jobs = {(name, modules): (run_of(root, name, modules), 1) for name in names for modules in (first, second)}
    worlds = run_worlds(root, jobs)
    far = {}
    for name in names:
        ours, theirs = worlds[name, first], worlds[name, second]
        assert isinstance(ours, World) and isinstance(theirs, World), (name, ours, theirs)
        found = {key: value for key, value in distance(ours, theirs).items() if key == "loss" or not CASES[name][2]}
        print(f"\n{name}, {first} and {second}, relative distance: {found}")
        costs = yardstick_of(CASES[name][1])
        far |= {(name, key): value for key, value in found.items() if value > YARDSTICKS * costs[key]}
    assert not far


@requires_gpus(1)
def test_without_our_kernels_a_training_is_the_same(tmp_path):
    check("plain", "portable", tmp_path, list(CASES))


@requires_gpus(1)
@requires_engine
def test_with_transformer_engine_a_training_is_the_same(tmp_path):
    check("plain", "engine", tmp_path, ["all", "fsdp", "lora", "delta"])


@requires_gpus(1)
def test_moments_in_bfloat16(tmp_path):
    short = OPTIM.model_copy(update={"moments": "bfloat16"})
    runs = [run_of(tmp_path, "all", "plain"), run_of(tmp_path, "recompute", "plain")]
    runs[1] = changed(runs[1], train=runs[1].train.model_copy(update={"optim": short}))
    runs[0] = changed(runs[0], train=runs[0].train.model_copy(update={"optim": OPTIM}))
    worlds = run_worlds(tmp_path, {"float32": (runs[0], 1), "bfloat16": (runs[1], 1)})
    assert all(isinstance(world, World) for world in worlds.values()), worlds
    assert distance(worlds["bfloat16"], worlds["float32"])["loss"] <= YARDSTICKS * yardstick_of("first")["loss"]
