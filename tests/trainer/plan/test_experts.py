"""Settings of a model with experts that are refused in one line, before anything runs."""

import pytest

from dataset_builders.errors import InputError
from flows.pipeline.plan import check_model
from flows.pipeline.recipe import load_recipe
from tests.helpers.run_dir import OPTIM
from tests.helpers.tiny_experts_model import experts_config
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import ExpertsConfig, TrainConfig
from trainer.families.qwen3_vl_moe.family import read_shape
from trainer.plan.checks import check_experts
from trainer.plan.estimate import estimate_memory
from trainer.plan.layout import check_layout

pytestmark = pytest.mark.promise(
    "A layout or setting that a model cannot train with is refused in one line before anything starts."
)


def train(**changes) -> TrainConfig:
    settings = {"seed": 0, "num_steps": 9, "global_batch_size": 2, "heldout_interval": 9, "optim": OPTIM}
    return TrainConfig(**settings, **{"precision": "bfloat16", **changes})


POOLED = ExpertsConfig(coefficient=0.1)


@pytest.mark.parametrize(
    ("changes", "parallel", "message"),
    [
        ({"precision": "float8"}, {}, "precision is float8, which is not supported with experts"),
        ({}, {"sharding": "fsdp"}, "sharding is fsdp, which is not supported with experts"),
        ({}, {"tp": 2}, "tp is 2, and each of these ranks would compute every token's .* set .*sequence_parallel=true"),
        ({"experts": POOLED}, {"pp": 2}, "pooled over all layers, which pp=2 divides; set .*=layer"),
    ],
)
def test_what_experts_do_not_support(changes, parallel, message):
    shape = read_shape(experts_config("listed"))
    check_experts(train(), ParallelConfig(), shape)
    check_experts(train(experts=POOLED), ParallelConfig(tp=2, sequence_parallel=True), shape)
    with pytest.raises(InputError, match=message):
        check_experts(train(**changes), ParallelConfig(**parallel), shape)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.experts.coefficient=0.1"], "train.experts.coefficient is 0.1, and the model has no experts"),
        (
            ["model.variant=qwen3_vl_moe_tiny", "train.experts.force_balance=true"],
            "force_balance=true deals tokens .* remove it",
        ),
        (["model.family=qwen3_vl_moe", "model.experts.top_k=9"], "top_k=9 is more than count=8"),
        (["model={kind: random, seed: 0, experts: {count: 4, top_k: 2, width: 8}}"], "qwen3_vl has no experts"),
    ],
)
def test_what_a_recipe_refuses(settings, message):
    with pytest.raises(InputError, match=message):
        check_model(load_recipe("embedded", settings).config)


@pytest.mark.parametrize(
    ("layout", "processes", "message"),
    [
        ({"ep": 3}, 3, "ep=3 does not divide num_experts=8; try .*ep=1"),
        ({"ep": 4}, 2, "ep=4 does not divide dp x cp x tp=2; try .*ep=2"),
        ({"ep": 4, "pp": 2}, 4, "ep=4 does not divide dp x cp x tp=2; try .*ep=2"),
    ],
)
def test_experts_and_ranks_divide_evenly(layout, processes, message):
    shape = read_shape(experts_config("listed"))
    sizes = {"world_size": processes, "global_batch_size": 12, "seq_len": 128, "pad_multiple": 1}
    with pytest.raises(InputError, match=message):
        check_layout(ParallelConfig(**layout), shape, **sizes)
    check_layout(ParallelConfig(ep=2, pp=2), shape, **{**sizes, "world_size": 4})


def test_a_dense_model_has_nothing_to_divide():
    with pytest.raises(InputError, match="ep is 2, and the model has no experts; set it to 1"):
        check_model(
            load_recipe(
                "embedded", ["execution.parallel.ep=2", "execution.cluster.processes=2", "train.global_batch_size=2"]
            ).config
        )


def test_the_estimate_divides_experts_by_ep_and_not_by_tp():
    shape = read_shape(experts_config("listed"))
    experts = sum(layer.feed_forward.expert_parameters for layer in shape.language.layers)
    assert experts == 3 * 8 * 3 * 64 * 48
    pieces = (range(shape.language.num_layers),)
    sizes = {"pieces": pieces, "dp": 2, "seq_len": 128, "max_patches": 64}
    whole, halved = (
        estimate_memory(shape, ParallelConfig(ep=ep), train(precision="float32"), **sizes) for ep in (1, 2)
    )
    assert whole["weights"] - halved["weights"] == whole["gradients"] - halved["gradients"] == 4 * experts / 2
    assert whole["optimizer"] == halved["optimizer"], "more ranks hold the same experts, and share their moments"
