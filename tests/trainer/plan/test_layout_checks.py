"""A layout or setting that cannot work is refused in one line, before anything starts, and what the line suggests
works."""

import dataclasses
import json
import random
import re

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from pydantic import ValidationError

from dataset_builders.errors import InputError
from flows.pipeline.plan import check_model
from flows.pipeline.recipe import load_recipe
from tests.helpers.run_dir import changed as changed_run
from tests.helpers.run_dir import check_job, write_job
from tests.helpers.shapes import QWEN_2B, changed, named_sizes
from tests.helpers.tiers import full
from tests.helpers.tiny_experts_model import experts_config
from tests.helpers.tiny_hybrid_model import hybrid_config, hybrid_hf_dir
from tests.helpers.tiny_model import FIRST, SECOND, tiny_hf_dir
from tests.trainer.train_config import train_config
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import ExpertsConfig
from trainer.families.qwen3_5_vl import family as qwen3_5
from trainer.families.qwen3_vl_moe import family as qwen3_vl_moe
from trainer.layers.decoder import decoder_config
from trainer.model.registry import read_model
from trainer.model.shape import ModelShape, Work
from trainer.plan.checks import check_experts
from trainer.plan.layout import FieldNames, check_layout
from trainer.plan.pieces import pipeline_pieces

pytestmark = pytest.mark.promise(
    "A layout or setting that a model cannot train with is refused in one line before anything starts."
)

TINY = {"first": FIRST.shape, "second": SECOND.shape}
EXPERTS = qwen3_vl_moe.read_shape(experts_config("listed"))
HYBRID = qwen3_5.read_shape(hybrid_config())
AROUND = ("world_size", "global_batch_size", "seq_len", "pad_multiple")


def refusal(shape: ModelShape | None, settings: dict[str, object]) -> str:
    """Return the message that refuses a layout, or an empty text. Settings: fields of ParallelConfig, and AROUND."""
    around = {name: settings[name] for name in AROUND}
    try:
        parallel = ParallelConfig(**{name: value for name, value in settings.items() if name not in AROUND})
        check_layout(parallel, shape, **around, names=FieldNames("", "world_size"))
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    except InputError as error:
        return str(error)
    return ""


def suggestions(message: str) -> list[dict[str, object]]:
    """Return the alternatives that a message proposes, each as fields with their values."""
    text = message.rpartition("; try ")[2]
    assert re.fullmatch(r"[\w.]+=\w+((, | or )[\w.]+=\w+)*", text), message
    fixes = []
    for alternative in text.split(" or "):
        pairs = [part.split("=") for part in alternative.split(", ")]
        fixes.append({key.rpartition(".")[2]: _value(value) for key, value in pairs})
    return fixes


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def settings_of(**changes: object) -> dict[str, object]:
    """A layout and its surroundings that fit each other, changed."""
    parallel = ParallelConfig.model_construct(**{k: v for k, v in changes.items() if k not in AROUND})
    pad = parallel.bin_multiple
    around = {"world_size": parallel.model_size, "global_batch_size": 8, "seq_len": 64 * pad, "pad_multiple": pad}
    return around | changes


REFUSALS = [
    (
        {"sequence_parallel": True},
        "sequence_parallel=true divides what tp ranks else hold whole, and tp=1; try sequence_parallel=false",
    ),
    ({"vpp": 2}, "vpp=2 divides what a rank of a pipeline holds, and pp=1; try vpp=1"),
    (
        {"first_pipeline_layers": 3},
        "first_pipeline_layers=3 leaves the rest to other ranks, and pp=1; try first_pipeline_layers=null",
    ),
    *(
        (
            {"sharding": "fsdp", **sizes},
            f"sharding=fsdp is for data parallel alone, not for {said}; try sharding=distributed_optimizer",
        )
        for sizes, said in (
            ({"tp": 2}, "tp=2, pp=1, cp=1"),
            ({"pp": 2}, "tp=1, pp=2, cp=1"),
            ({"cp": 2}, "tp=1, pp=1, cp=2"),
        )
    ),
    ({"tp": 3}, "tp=3 does not divide the model's num_heads=16; try tp=2"),
    ({"tp": 16}, "tp=16 does not divide the model's num_kv_heads=8; try tp=8"),
    (
        {"pp": 27},
        "pp=27 ranks x vpp=1 are 27 pieces of the model's num_layers=28, which need 29 layers, 3 of them in the first: "
        "one per deepstack level; try pp=26",
    ),
    (
        {"pp": 4, "vpp": 7, "world_size": 4},
        "pp=4 ranks x vpp=7 are 28 pieces of the model's num_layers=28, which need 30 layers, 3 of them in the first: "
        "one per deepstack level; try pp=3 or vpp=6",
    ),
    (
        {"pp": 4, "first_pipeline_layers": 28},
        "first_pipeline_layers=28 of num_layers=28 leaves 0 to the others of pp=4 ranks, whose vpp=1 pieces each need "
        "3 layers in all; try first_pipeline_layers=25",
    ),
    (
        {"pp": 4, "vpp": 2, "first_pipeline_layers": 24},
        "first_pipeline_layers=24 of num_layers=28 leaves 4 to the others of pp=4 ranks, whose vpp=2 pieces each need "
        "6 layers in all; try pp=3 or vpp=1 or first_pipeline_layers=22",
    ),
    (
        {"pp": 2, "vpp": 2, "first_pipeline_layers": 3},
        "first_pipeline_layers=3 is for the first rank's vpp=2 pieces, which need 4 layers, 3 of them in the first: "
        "one per deepstack level; try vpp=1 or first_pipeline_layers=4",
    ),
    (
        {"pp": 30, "vpp": 30},
        "pp=30 ranks x vpp=30 are 900 pieces of the model's num_layers=28, which need 902 layers, 3 of them in the "
        "first: one per deepstack level; try pp=26, vpp=1, first_pipeline_layers=null",
    ),
    (
        {"tp": 2, "cp": 2, "world_size": 6},
        "world_size=6 is not a multiple of tp=2 x pp=1 x cp=2 = 4; try world_size=4",
    ),
    ({"pp": 2, "world_size": 1}, "world_size=1 is not a multiple of tp=1 x pp=2 x cp=1 = 2; try world_size=2"),
    (
        {"tp": 2, "world_size": 6, "global_batch_size": 8},
        "train.global_batch_size=8 bins is not a multiple of dp=3, where dp is world_size=6 / (tp x pp x cp = 2); "
        "try train.global_batch_size=9",
    ),
    (
        {"pp": 2, "vpp": 2, "world_size": 4, "global_batch_size": 6},
        "train.global_batch_size=6 bins is not a multiple of dp=2 x pp=2 = 4 (vpp=2), where dp is world_size=4 / "
        "(tp x pp x cp = 2); try train.global_batch_size=4",
    ),
    (
        {"pp": 2, "vision": "dealt", "vision_split": "tensor_parallel"},
        "vision=dealt gives each of pp=2 ranks whole images, and vision_split=tensor_parallel parts of matrices; "
        "try vision_split=images",
    ),
    (
        {"vision": {"ranks": 2}, "vision_split": "tensor_parallel", "world_size": 3},
        "vision.ranks=2 encode whole images, and vision_split=tensor_parallel is for ranks that share matrices; "
        "try vision_split=images",
    ),
    (
        {"vision": {"ranks": 1}, "sharding": "fsdp", "world_size": 2},
        "vision.ranks=1 get whole weights from one rank, and sharding=fsdp has none with whole weights; "
        "try sharding=distributed_optimizer",
    ),
    (
        {"vision": {"ranks": 3, "tp": 2}, "world_size": 4},
        "vision.ranks=3 is not a multiple of vision.tp=2; try vision.ranks=4",
    ),
    (
        {"vision": {"ranks": 1}, "tp": 2, "world_size": 2},
        "world_size=2 without vision.ranks=1 is not a multiple of tp=2 x pp=1 x cp=1 = 2; try world_size=3",
    ),
    (
        {"vision": {"ranks": 1}, "world_size": 1},
        "world_size=1 without vision.ranks=1 is not a multiple of tp=1 x pp=1 x cp=1 = 1; try world_size=2",
    ),
    (
        {"vision": {"ranks": 4, "tp": 2}, "world_size": 7, "global_batch_size": 6},
        "vision.ranks=4 with vision.tp=2 encode for dp=3 copies of the language model, and neither number of copies is "
        "a multiple of the other; try vision.ranks=2, world_size=5",
    ),
    (
        {"vision": {"ranks": 2}, "world_size": 6, "global_batch_size": 6},
        "train.global_batch_size=6 bins is not a multiple of dp=4, where dp is (world_size=6 - vision.ranks=2) / "
        "(tp x pp x cp = 1); try train.global_batch_size=4",
    ),
    (
        {"vision": {"ranks": 3, "tp": 3}, "world_size": 4},
        "vision.tp=3 does not divide the model's vision_num_heads=16; try vision.tp=2",
    ),
    (
        {"cp": 2, "seq_len": 90, "pad_multiple": 3},
        "plan_bins.seq_len=90 is not a multiple of 4 (cp=2, tp=1, sequence_parallel=false); try plan_bins.seq_len=96",
    ),
    (
        {"tp": 2, "sequence_parallel": True, "seq_len": 65, "pad_multiple": 1},
        "plan_bins.seq_len=65 is not a multiple of 2 (cp=1, tp=2, sequence_parallel=true); try plan_bins.seq_len=66",
    ),
    (
        {"tp": 2, "cp": 4, "sequence_parallel": True, "seq_len": 96, "pad_multiple": 12},
        "plan_bins.pad_multiple=12 is not a multiple of 8 (cp=4); try plan_bins.pad_multiple=8",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSALS, ids=[str(changes) for changes, _ in REFUSALS])
def test_each_refusal_says_its_fields_and_the_nearest_that_works(changes, words):
    assert refusal(QWEN_2B, settings_of(**changes)) == words


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("intermediate_size", 6148, "tp=8 does not divide the model's intermediate_size=6148; try tp=4"),
        ("vocab_size", 151938, "tp=8 does not divide the model's vocab_size=151938; try tp=2"),
        (
            "vision_num_heads",
            12,
            "tp=8 does not divide the model's vision_num_heads=12 (vision_split=tensor_parallel); "
            "try tp=4 or vision_split=images",
        ),
        (
            "vision_intermediate_size",
            4098,
            "tp=8 does not divide the model's vision_intermediate_size=4098 (vision_split=tensor_parallel); "
            "try tp=2 or vision_split=images",
        ),
    ],
)
def test_every_width_that_tensor_parallel_divides(field, value, words):
    settings = settings_of(tp=8, vision_split="tensor_parallel")
    shape = changed(QWEN_2B, **{field: value})
    assert refusal(QWEN_2B, settings) == ""
    assert refusal(shape, settings) == words
    by_images = refusal(shape, settings | {"vision_split": "images"})
    assert by_images == ("" if field.startswith("vision") else words)


@pytest.mark.parametrize(
    ("shape", "changes", "words"),
    [
        (EXPERTS, {"ep": 3, "world_size": 3}, "ep=3 does not divide num_experts=8; try ep=1"),
        (EXPERTS, {"ep": 4, "pp": 2, "world_size": 4}, "ep=4 does not divide dp x cp x tp=2; try ep=2"),
        (EXPERTS, {"ep": 2, "pp": 2, "world_size": 4}, ""),
        (
            HYBRID,
            {"cp": 4},
            "cp=4 x tp=1 does not divide the model's linear_num_key_heads=2, which its ranks share; try cp=2",
        ),
        (
            HYBRID,
            {"cp": 2, "tp": 2},
            "cp=2 x tp=2 does not divide the model's linear_num_key_heads=2, which its ranks share; try cp=1",
        ),
        (HYBRID, {"tp": 4}, "tp=4 does not divide the model's num_kv_heads=2; try tp=2"),
        (HYBRID, {"tp": 2}, ""),
        (HYBRID, {"cp": 2}, ""),
    ],
    ids=str,
)
def test_experts_and_delta_layers_divide_evenly(shape, changes, words):
    assert refusal(shape, settings_of(**changes)) == words


POOLED = ExpertsConfig(coefficient=0.1)
DELTA_IN_FLOAT8 = "train.precision is float8, in which the delta layers of a qwen3_5 model"


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
    check_experts(train_config(), ParallelConfig(), EXPERTS)
    check_experts(train_config(experts=POOLED), ParallelConfig(tp=2, sequence_parallel=True), EXPERTS)
    with pytest.raises(InputError, match=message):
        check_experts(train_config(**changes), ParallelConfig(**parallel), EXPERTS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.experts.coefficient=0.1"], "train.experts.coefficient is 0.1, and the model has no experts"),
        (
            ["execution.parallel.ep=2", "execution.cluster.processes=2", "train.global_batch_size=2"],
            "ep is 2, and the model has no experts; set it to 1",
        ),
        (
            ["model.variant=qwen3_vl_moe_tiny", "train.experts.force_balance=true"],
            "force_balance=true deals tokens .* remove it",
        ),
        (["model.family=qwen3_vl_moe", "model.experts.top_k=9"], "top_k=9 is more than count=8"),
        (["model={kind: random, seed: 0, experts: {count: 4, top_k: 2, width: 8}}"], "qwen3_vl has no experts"),
        (["model.family=qwen3_5", "train.precision=float8"], DELTA_IN_FLOAT8),
        (["train.optim.moments=bfloat16", "execution.parallel.sharding=fsdp"], "set train.optim.moments=float32"),
    ],
)
def test_what_a_recipe_refuses_before_its_first_stage(settings, message):
    with pytest.raises(InputError, match=message):
        check_model(load_recipe("embedded", settings).config)


def test_a_model_directory_is_refused_before_the_first_stage():
    with pytest.raises(InputError, match=DELTA_IN_FLOAT8):
        check_model(load_recipe("embedded", [f"model={hybrid_hf_dir()}", "train.precision=float8"]).config)


def test_ranks_of_images_need_a_model_that_takes_images():
    shape = dataclasses.replace(TINY["first"], vision=None)
    assert refusal(shape, settings_of(vision={"ranks": 1}, world_size=2)) == (
        "vision.ranks=1 encode images, and the model takes text alone; try vision=first_rank"
    )


# That others work is shown against megatron-core below, and by the trainings of tests/equivalence/.
ACCEPTED = {
    "fsdp": {"sharding": "fsdp", "world_size": 2},
    "fsdp of one rank": {"sharding": "fsdp"},
    "tensor_parallel vision on one": {"vision_split": "tensor_parallel"},
    "cp": {"cp": 2, "world_size": 4},
    "dealt": {"pp": 2, "vision": "dealt"},
    "dealt to one": {"vision": "dealt", "vision_split": "tensor_parallel"},
    "own": {"vision": {"ranks": 1}, "world_size": 3},
    "own for each": {"vision": {"ranks": 4}, "world_size": 6},
    "own with tp": {"vision": {"ranks": 4, "tp": 2}, "pp": 2, "world_size": 6},
    "first": {"pp": 2, "first_pipeline_layers": 3},
    "everything": {
        **{"tp": 2, "pp": 2, "cp": 2, "vpp": 2, "sequence_parallel": True, "world_size": 16},
        **{"vision_split": "tensor_parallel", "recompute": "full", "recompute_vision": True},
    },
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_layouts_that_work_are_accepted(name):
    # FIRST has 4 layers and 2 deepstack levels: the first of four pieces would have one layer.
    for shape in (changed(TINY["first"], num_layers=8), QWEN_2B):
        assert refusal(shape, settings_of(**ACCEPTED[name])) == ""


def draw(rng: random.Random) -> tuple[ModelShape, dict[str, object]]:
    """Small numbers, most of which do not go together; of seq_len and pad_multiple only what a plan accepts."""
    shape = changed(
        QWEN_2B,
        num_heads=rng.choice([2, 4, 6, 12]),
        num_kv_heads=rng.choice([1, 2, 4, 6]),
        intermediate_size=rng.choice([6, 8, 12, 24]),
        vocab_size=rng.choice([8, 12, 30]),
        vision_num_heads=rng.choice([2, 3, 4]),
        vision_intermediate_size=rng.choice([4, 6, 8]),
        num_layers=rng.randint(1, 13),
        num_deepstack=rng.randint(0, 4),
    )
    pad_multiple = rng.randint(1, 12)
    settings = {
        "tp": rng.choice([1, 1, 2, 3, 4, 6]),
        "pp": rng.choice([1, 1, 2, 3, 4]),
        "cp": rng.choice([1, 1, 2, 3]),
        "vpp": rng.choice([1, 1, 2, 3]),
        "sequence_parallel": rng.random() < 0.4,
        "first_pipeline_layers": rng.choice([None, None, 1, 2, 3, 4, 6]),
        "vision": rng.choice(["first_rank", "first_rank", "dealt"]),
        "vision_split": rng.choice(["images", "tensor_parallel"]),
        "sharding": rng.choice(["distributed_optimizer"] * 4 + ["fsdp"]),
        "world_size": rng.randint(1, 24),
        "global_batch_size": rng.randint(1, 24),
        "seq_len": pad_multiple * rng.randint(1, 40),
        "pad_multiple": pad_multiple,
    }
    return shape, settings


@pytest.mark.parametrize("draws", [500, full(3000)])
def test_following_the_suggestions_ends_at_a_layout_that_works(draws):
    """Each alternative is followed to its end, and no field is ever suggested a second time."""
    rng, accepted, followed = random.Random(0), 0, 0
    for _ in range(draws):
        shape, settings = draw(rng)
        left = [(settings, frozenset())]
        while left:
            settings, changed = left.pop()
            message = refusal(shape, settings)
            if not message:
                accepted += 1
                continue
            assert "\n" not in message
            named = dict(pair.split("=") for pair in re.findall(r"\b\w+=\w+", message.partition("; try ")[0]))
            known = {field: _shown(value) for field, value in (named_sizes(shape) | settings).items()}
            assert len(named) > 1 and named.items() <= (known | {"dp": named.get("dp")}).items(), message
            for fix in suggestions(message):
                assert fix.keys() <= settings.keys(), message
                assert changed.isdisjoint(fix), (message, changed)
                assert (settings | fix)["seq_len"] % (settings | fix)["pad_multiple"] == 0, message
                left.append((settings | fix, changed | fix.keys()))
                followed += 1
    assert accepted > draws and followed > 2 * draws


def test_what_is_accepted_is_what_megatron_core_accepts(monkeypatch):
    """For heads and layers megatron-core refuses all that we refuse, except deepstack and shared key-value heads."""
    rng, agreed = random.Random(1), {True: 0, False: 0}
    for _ in range(1500):
        shape, settings = draw(rng)
        shape = changed(shape, num_deepstack=0, num_heads=12, intermediate_size=24, vocab_size=24)
        settings |= {"sharding": "distributed_optimizer", "vision_split": "images", "sequence_parallel": False}
        fields = {name: settings[name] for name in ("tp", "pp", "vpp", "first_pipeline_layers")}
        around = settings_of(**fields, global_batch_size=settings["pp"])
        ours = refusal(shape, around) == ""
        try:
            numbers = layers_of(shape, ParallelConfig(**fields), monkeypatch)
            theirs = (
                numbers == list(range(shape.language.num_layers))
                and shape.language.layers[0].mixer.num_kv_heads % fields["tp"] == 0
            )
        except (ValueError, AssertionError, IndexError):  # the last: more pieces than layers
            theirs = False
        assert ours == theirs, (fields, shape, refusal(shape, around))
        agreed[ours] += 1
    assert min(agreed.values()) > 100


def layers_of(shape: ModelShape, parallel: ParallelConfig, monkeypatch) -> list[int]:
    """Numbers of the layers that megatron-core builds, over all pieces in the order of the model."""
    pieces = pipeline_pieces(shape, parallel, Work(64, 64, 0, 64, 0))
    config = decoder_config(shape.language, parallel, torch.float32, pieces)
    stages = range(parallel.vpp) if parallel.vpp > 1 else [None]
    monkeypatch.setattr(
        parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", len(stages) if parallel.vpp > 1 else None
    )
    numbers = []
    for stage in stages:
        for rank in range(parallel.pp):
            monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank)
            count = get_num_layers_to_build(config, stage, rank)
            assert count > 0
            start = get_transformer_layer_offset(config, stage, rank)
            numbers += range(start, start + count)
    return numbers


def test_without_a_model_the_rest_is_checked_all_the_same():
    assert refusal(None, settings_of(tp=7)) == ""
    assert refusal(None, settings_of(tp=7, world_size=8)).endswith("try world_size=7")


@pytest.mark.parametrize(("shape", "config"), [("first", FIRST), ("second", SECOND)])
def test_the_embedded_model_has_the_shape_it_is_made_with(shape, config):
    made = read_model(tiny_hf_dir(shape))[1]
    assert (made.language, made.vision) == (config.shape.language, config.shape.vision)


def test_a_run_is_checked_against_what_is_on_disk(tmp_path):
    run = write_job(tmp_path, num_steps=4, global_batch_size=6)
    check_job(run, world_size=2)
    with pytest.raises(InputError, match=r"train\.global_batch_size=6 bins is not a multiple of dp=4.*processes=4"):
        check_job(run, world_size=4)
    with pytest.raises(
        InputError, match=r"parallel\.tp=3 does not divide the model's num_heads=4; try execution\.parallel\.tp=2"
    ):
        check_job(changed_run(run, parallel=ParallelConfig(tp=3)), world_size=3)
    with pytest.raises(InputError, match=r"plan_bins\.pad_multiple=16 is not a multiple of 32 \(cp=16"):
        check_job(changed_run(run, parallel=ParallelConfig(cp=16)), world_size=16)
    with pytest.raises(InputError, match=r"bins_dir=\S*data is an artifact of tokenize; give one of plan_bins"):
        check_job(run.model_copy(update={"bins_dir": run.tokenized_dir}), world_size=2)
