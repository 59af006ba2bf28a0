"""Which runs of a sweep share a base, and what a person is told about it."""

import pytest

from flows.deployments.sweep import check_grid, sharing_of

pytestmark = pytest.mark.promise(
    "Runs of a sweep over one loaded base have the losses, adapters and moments of a process of their own, to the bit."
)

LORA = ["train.adapter={rank: 4, alpha: 8}", "train.num_steps=50"]
FROZEN = ["train.vision.frozen=true", "train.merger.frozen=true", "encode_images={dtype: float32}"]


def sharing(grid: list[str], *overrides: str):
    variants = check_grid("embedded", [*LORA, *overrides], grid)
    shared = sharing_of(variants)
    trainings = [variant.recipe.config.train for variant in variants]
    later = {run: [trainings.index(each) for each in others] for run, others in shared.later.items()}
    return later, shared.line


def test_rank_rate_targets_seed_and_steps_share_a_base():
    for grid in (
        ["train.adapter.rank=[4,8,16]"],
        ["train.adapter.targets=[[attention],[mlp],[merger]]"],
        ["train.optim.lr=[1e-3,2e-3,3e-3]"],
        ["train.seed=[0,1,2]"],
        ["train.num_steps=[50,60,70]"],
    ):
        later, line = sharing(grid)
        assert later == {0: [1, 2], 1: [2], 2: []}, grid
        assert line.startswith("One process trains these over one load of the base: ") and "alone" not in line


def test_features_are_those_of_one_artifact_for_all_runs():
    """The settings of encode_images are equal, and its inputs come from equal stages; so its fingerprint is one."""
    later, _ = sharing(["train.adapter.rank=[4,8]"], *FROZEN)
    assert later == {0: [1], 1: []}


@pytest.mark.parametrize(
    ("grid", "overrides"),
    [
        (["train.precision=[float32,bfloat16]"], []),
        (["train.adapter.base=[train_precision,float8]"], []),
        (["plan_bins.seq_len=[1024,2048]"], []),
        (["model.seed=[0,1]"], []),
        (["encode_images=[{dtype: float32},{dtype: bfloat16}]"], FROZEN[:2]),
    ],
)
def test_another_base_or_other_inputs_share_nothing(grid, overrides):
    later, line = sharing(grid, *overrides)
    assert later == {} and line == "Each run loads the model by itself: no other run has its base, data and layout"


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("train.adapter=null", "train.adapter=null trains the weights themselves"),
        ("train.adapter.modules_to_save=['lm_head']", "train.adapter.modules_to_save trains modules of the base"),
        ("execution.parallel.sharding=fsdp", "execution.parallel.sharding=fsdp divides the base"),
    ],
)
def test_why_runs_do_not_share_is_said(override, why):
    later, line = sharing(["train.seed=[0,1]"], override)
    assert later == {} and line.startswith(f"Each run loads the model by itself: {why}")


def test_two_groups_and_runs_alone_are_one_line():
    adapters = "[null,{rank: 4, alpha: 8},{rank: 8, alpha: 8}]"
    later, line = sharing([f"train.adapter={adapters}", "model.seed=[0,1]"])
    assert {run: len(others) for run, others in later.items()} == {2: 1, 3: 1, 4: 0, 5: 0}
    assert line.count("One process trains these over one load of the base: ") == 2 and "\n" not in line
    assert "Trained alone, because train.adapter=null trains the weights themselves: " in line
