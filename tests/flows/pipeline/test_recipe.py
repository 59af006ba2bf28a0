"""Recipes: an error in a recipe is one line that names the field, the value and the way out."""

import itertools
import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from safetensors.numpy import save_file

from dataset_builders.errors import InputError
from dataset_builders.sources.registry import BUILDERS, get_builder
from flows.cli.plan import size_rows
from flows.pipeline.config import EMBEDDED_RECIPES, PipelineConfig
from flows.pipeline.plan import Plan, check_model
from flows.pipeline.recipe import RECIPES, known_recipes, load_recipe, submodels
from flows.pipeline.steps import release_config
from tests.helpers.plans import sources_of, steps_of, unopened
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir
from trainer.contract.adapter import AdapterConfig
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_config
from trainer.contract.run import ProfileConfig


def _error(*overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(overrides=overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def write_recipes(tmp_path, **texts: str) -> dict[str, str]:
    """Write recipe files and return name -> path."""
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    return {name: str(tmp_path / f"{name}.yaml") for name in texts}


def test_a_recipe_over_another_one_says_what_differs(tmp_path):
    paths = write_recipes(
        tmp_path,
        middle="base: cauldron\nname: middle\ntrain: {global_batch_size: 4, optim: {lr: 2.0e-5}}\n",
        top=f"base: {tmp_path}/middle.yaml\nmodel: {{seed: 3}}\nconvert: {{builder: llava, options: {{}}}}\n"
        "train: {num_steps: 50}\n",
    )
    top, cauldron = load_recipe(paths["top"]).config, load_recipe("cauldron").config
    assert (top.name, top.model.seed, top.convert.builder) == ("middle", 3, "llava")
    assert (top.train.num_steps, top.train.global_batch_size, top.train.optim.lr) == (50, 4, 2e-5)
    assert top.train.optim.warmup_steps == cauldron.train.optim.warmup_steps and top.plan_bins == cauldron.plan_bins


def test_bases_without_an_end_are_refused(tmp_path):
    paths = write_recipes(tmp_path, a=f"base: {tmp_path}/b.yaml\n", b=f"base: {tmp_path}/a.yaml\n")
    with pytest.raises(InputError, match=r"a\.yaml: base=.*b\.yaml is a recipe that has this one as its base"):
        load_recipe(paths["a"])
    with pytest.raises(InputError, match=r"base=3 is not the name or path of a recipe"):
        load_recipe(write_recipes(tmp_path, c="base: 3\n")["c"])


PUBLISHED = {
    "Qwen/Qwen3-VL-2B-Instruct": "qwen3_vl_2b",
    "Qwen/Qwen3-VL-4B-Instruct": "qwen3_vl_4b",
    "Qwen/Qwen3-VL-8B-Instruct": "qwen3_vl_8b",
    "Qwen/Qwen3.5-2B": "qwen3_5_2b",
    "Qwen/Qwen3.5-4B": "qwen3_5_4b",
    "Qwen/Qwen3.5-9B": "qwen3_5_9b",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "qwen3_vl_30b_a3b",
    "Qwen/Qwen3.5-35B-A3B": "qwen3_5_35b_a3b",
}
ROOM = {"24gb": 22.6e9, "80gb": 80e9, "8x80gb": 80e9}  # bytes of a GPU besides CUDA's own and a reserve


@pytest.mark.parametrize("name", [path.stem for path in RECIPES.glob("*.yaml") if "\nbase: " in path.read_text()])
def test_a_recipe_of_a_gpu_fits_it_by_estimate(name):
    config = load_recipe(name).config
    config = load_recipe(name, changes={"model": {"variant": PUBLISHED[config.model], "seed": 0}}).config
    memory = float(dict(size_rows(unopened(config)))["memory"].split()[1]) * 1e9
    assert 0.4 * ROOM[name.split("_")[1]] < memory < ROOM[name.split("_")[1]]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.optim.lr_=1", "unknown key train.optim.lr_; did you mean train.optim.lr?"),
        ("data={kind: easyvqa}", "data.kind='easyvqa' should be 'easy_vqa'"),
        ("lr=1e-5", "unknown key lr; `lr` belongs to `train.optim` or `train.vision`"),
        ("model.hiden_size=64", "unknown key model.hiden_size; did you mean model.hidden_size?"),
        ("plan_bins.mixture={charts: {repeat: 2}}", "; did you mean plan_bins.mixture.charts.repeats?"),
        ("execution.profile.first=3", "; did you mean execution.profile.first_step?"),
        ("model.source=x", "unknown key model.source; `source` belongs to `data`"),
        (
            "max_pixls=64",
            "unknown key max_pixls; did you mean `max_pixels` of `model` or `tokenize` or `tokenize.videos`?",
        ),
        ("train.data=x", "unknown key train.data; `data` belongs to the top of a recipe"),
        ("zzz=1", "unknown key zzz; known here: name, data, model"),
    ],
)
def test_an_unknown_key_names_the_nearest(override, words):
    assert words in _error(override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.optim.lr=3", "train.optim.lr=3 should be less than or equal to 1 [peak learning rate]"),
        ("train.optim.lr=-1e-5", "should be greater than 0"),
        *(
            (f"convert.subsets={given}", f"{name} is no name of a subset; it has letters, digits, _ and - alone")
            for given, name in (
                *(("[/absolute]", "'/absolute'"), ('["a\\0"]', r"'a\x00'"), ('["."]', "'.'"), ('["**"]', "'**'")),
                *(("[a, ../b]", "'../b'"), ('["a\\n"]', r"'a\n'"), ('[""]', "''"), ("[a/b]", "'a/b'")),
            )
        ),
        ("train.num_steps=many", "train.num_steps='many' should be a valid integer"),
        ("train.precision=float16", "train.precision='float16' should be 'float32', 'bfloat16' or 'float8'"),
        ("data.num_scans=5", "data.num_scans=5 should be greater than or equal to 10"),
        ("train=3", "train=3 should be a mapping of names to values"),
        ("name=My data", "name='My data' should match the pattern"),
        (f"train.seed={2**70}", f"train.seed={2**70} should be less than or equal to 4294967295 [order of the bins]"),
        ("tokenize.learn=first", "tokenize.learn.answers='first' should be 'all' or 'last'"),
        ("tokenize.learn.reasoning=perhaps", "tokenize.learn.reasoning='perhaps' should be true or false"),
        ("tokenize.learn.reason=true", "did you mean tokenize.learn.reasoning?"),
        ("execution.registry.gates={exact_match: {min: .nan}}", "should be a finite number"),
        ("execution.registry.gates={stop_rat: {min: 1}}", "no score 'stop_rat'; did you mean 'stop_rate'?"),
        ("execution.registry.metric=exact_mach/digits", "no score 'exact_mach'; did you mean 'exact_match'?"),
        (
            "execution.registry.gates={same_answers/a: {min: 1}}",
            "over all subsets together; give same_answers",
        ),
        ("verify=null", "execution.registry.gates.same_answers needs the answers of other programs"),
    ],
)
def test_a_value_out_of_bounds_names_the_bound(override, words):
    assert words in _error(override)


def _numbers(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if inner := submodels(field.annotation):
            yield from itertools.chain.from_iterable(_numbers(one, f"{prefix}{name}.") for one in inner)
        elif field.annotation in (int, float, int | None, float | None):
            yield prefix + name, field


def test_every_number_has_bounds():
    """Otherwise a request could ask for 100,000 processes, or a typing error for 10^18 steps."""
    options = [(f"convert.options of {name}", get_builder(name).options) for name in BUILDERS]
    numbers = [pair for prefix, model in [("", PipelineConfig), *options] for pair in _numbers(model, prefix)]
    assert len(numbers) > 60
    for dotted, field in numbers:
        bounds = {name for limit in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(limit, name)}
        is_score = dotted.startswith("execution.registry.gates.")  # bounds for a metric on a scale of the user's own
        assert is_score or len(bounds) == 2, f"{dotted} has the bounds {bounds}"


def test_nothing_held_out_is_fine_where_the_source_has_splits_of_its_own():
    options = "convert.options={target: json}"
    config = load_recipe(overrides=["convert.heldout_fraction=0", "convert.builder=cord_v2", options]).config
    assert config.convert.heldout_fraction == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tokenize.max_seq_len=99999"], "tokenize.max_seq_len=99999 is more than a bin holds (plan_bins.seq_len="),
        (["train.optim.warmup_steps=100000"], "leaves nothing of num_steps"),
        (["train.global_batch_size=true"], "train.global_batch_size=true should be a number"),
        (["plan_bins.mixture={mine: {repeats: true}}"], "plan_bins.mixture.mine.repeats=true should be a number"),
        (["execution.registry.gates={stop_rate: {min: true}}"], "gates.stop_rate.min=true should be a number"),
        (["data="], "data='' should not be empty"),
        (["model="], "model='' should not be empty"),
        (["data=[]"], "data=[] should not be empty"),
        (["model=/models/x", "model.seed=1"], "model is '/models/x', which has no fields"),
        (["model=[]"], "model=[] should be a text or a mapping of names to values"),
        (["convert.heldout_files=val.jsonl"], "convert.heldout_files='val.jsonl' should be a list, such as [a, b]"),
        (["convert.options=3"], "convert.options=3 should be a mapping of names to values"),
        (["convert.heldout_files=[3]"], "convert.heldout_files.0=3 should be a text"),
        (["train.num_epochs=2", "train.num_steps=9"], "give either num_steps or num_epochs and make the other null"),
        (["train.num_steps=null"], "give either num_steps or num_epochs and make the other null, not num_steps=None"),
        (["convert.heldout_fraction=0"], "leaves nothing to evaluate on; try convert.heldout_fraction=0.1"),
        (
            ["execution.parallel.cp=2", "plan_bins.pad_multiple=4"],
            "execution.cluster.processes=1 is not a multiple of tp=1 x pp=1 x cp=2 = 2; "
            "try execution.cluster.processes=2",
        ),
        (
            ["execution.cluster.processes=3", "train.global_batch_size=4"],
            "train.global_batch_size=4 bins is not a multiple of dp=3, where dp is execution.cluster.processes=3 / "
            "(tp x pp x cp = 1); try train.global_batch_size=3",
        ),
        (
            ["execution.parallel.cp=2", "execution.cluster.processes=2", "plan_bins.pad_multiple=1"],
            "try plan_bins.pad_multiple=4",
        ),
        (
            ["execution.profile.first_step=9", "train.num_steps=8", "train.optim.warmup_steps=1"],
            "execution.profile.first_step=9 is beyond train.num_steps=8; try execution.profile.first_step=1",
        ),
        (["execution.profile.rank=1"], "execution.profile.rank=1 is not below execution.cluster.processes=1"),
        (["plan_bins.max_patches=4"], "more than plan_bins.max_patches=4; try plan_bins.max_patches="),
    ],
)
def test_settings_of_two_stages_that_contradict(overrides, words):
    assert words in _error(*overrides)


@pytest.mark.parametrize(
    ("recipe", "overrides", "changes", "given"),
    [
        ("num_epochs: 5", ["train.num_steps=20"], {}, {"num_steps": 20, "num_epochs": None}),
        ("num_steps: 20", ["train.num_epochs=3"], {}, {"num_steps": None, "num_epochs": 3}),
        ("num_steps: 20", [], {"train.num_epochs": 3}, {"num_steps": None, "num_epochs": 3}),
        ("num_epochs: 5", ["train.num_steps=20", "train.num_epochs=null"], {}, {"num_steps": 20, "num_epochs": None}),
        ("num_epochs: 5", ["train.num_steps=null"], {}, {"num_steps": None, "num_epochs": 5}),
    ],
)
def test_what_is_set_replaces_its_alternative_in_the_recipe(tmp_path, recipe, overrides, changes, given):
    other = "num_steps" if "epochs" in recipe else "num_epochs"
    text = f"base: embedded\ntrain: {{{other}: null, {recipe}, optim: {{warmup_steps: 1}}}}\n"
    train = load_recipe(write_recipes(tmp_path, my=text)["my"], overrides, changes).config.train
    assert {name: getattr(train, name) for name in given} == given


def test_a_warmup_that_is_set_replaces_the_other_warmup():
    optim = load_recipe(overrides=["train.optim.warmup_fraction=0.1"]).config.train.optim
    assert (optim.warmup_fraction, optim.warmup_steps) == (0.1, None)


@pytest.mark.parametrize("override", ["train.optim.lr", "=3", "lr:3"])
def test_an_override_has_a_form(override):
    assert "is not of the form a.b=value" in _error(override)


def test_the_layout_is_checked_against_a_models_directory_before_any_work(tmp_path):
    overrides = [f"model={tiny_hf_dir()}", "execution.parallel.tp=4", "execution.cluster.processes=4"]
    recipe = load_recipe(overrides=[*overrides, "train.global_batch_size=4"])
    words = r"execution\.parallel\.tp=4 does not divide .*num_kv_heads=2; try execution\.parallel\.tp=2"
    with pytest.raises(InputError, match=words):
        Plan.open(recipe, tmp_path)
    assert not list(tmp_path.iterdir())


def test_overrides_are_what_the_run_is_named_by():
    recipe = load_recipe(overrides=["train.optim.lr=1e-5", "execution.num_workers=3", "model=/models/x"])
    assert recipe.config.train.optim.lr == 1e-5
    assert recipe.differs["train.optim.lr"] == 1e-5 and recipe.differs["model"] == "/models/x"
    assert not any(key.startswith("execution") for key in recipe.differs)
    assert recipe.config.model == "/models/x" and recipe.config.execution.num_workers == 3


def test_which_answers_are_learnt_is_a_word_or_a_mapping():
    """Identities from before `reasoning` existed hold the word. The word and the equal mapping name the
    same artifact."""
    identity = load_recipe().config.identity()["tokenize"]
    assert identity["learn"] == "all"
    for override in ("tokenize.learn=last", "tokenize.learn.answers=last", "tokenize.learn={answers: last}"):
        assert load_recipe(overrides=[override]).config.identity()["tokenize"] == identity | {"learn": "last"}
    recipe = load_recipe(overrides=["tokenize.learn.reasoning=false"])
    assert recipe.config.identity()["tokenize"] == identity | {"learn": {"answers": "all", "reasoning": False}}
    assert recipe.differs == {"tokenize.learn.answers": "all", "tokenize.learn.reasoning": False}


@pytest.mark.parametrize("setting", ["num_workers=3", "registry.margin=0.5"])
def test_execution_is_no_identity(setting):
    one, two = load_recipe(), load_recipe(overrides=[f"execution.{setting}"])
    assert one.config.execution != two.config.execution
    assert one.config.identity() == two.config.identity() and two.differs == {}


def test_a_section_that_is_none_comes_with_its_first_field():
    without, traced = load_recipe(), load_recipe(overrides=["execution.profile.first_step=3"])
    assert without.config.execution.profile is None
    assert traced.config.execution.profile == ProfileConfig(first_step=3)
    assert without.config.identity() == traced.config.identity() and traced.differs == {}


EMBEDDED = (RECIPES / "embedded.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "is not YAML"),
        ("- 1", "holds no mapping"),
        (re.sub(r"\n +lr:.*", "", EMBEDDED), r"recipe mine: train.optim.lr is missing \[peak learning rate\]"),
    ],
    ids=["no YAML", "a list", "without a decision"],
)
def test_a_file_that_is_no_recipe(tmp_path, text, words):
    with pytest.raises(InputError, match=words):
        load_recipe(write_recipes(tmp_path, mine=text)["mine"])


def test_a_recipe_of_ones_own_by_path(tmp_path):
    assert load_recipe(write_recipes(tmp_path, mine=EMBEDDED)["mine"]).name == "mine"


CACHED = ["encode_images.dtype=bfloat16", "train.vision.frozen=true", "train.merger.frozen=true"]


def test_features_are_made_before_a_training_that_reads_them():
    config = load_recipe(overrides=CACHED).config
    steps = steps_of(config)
    names = list(steps)
    assert names.index("plan_bins") < names.index("encode_images") < names.index("train")
    assert sources_of(steps["train"])["features"] == "encode_images"
    assert sources_of(steps["encode_images"]) == {"model": "embedded_model", "tokenized": "tokenize"}
    assert steps["encode_images"].config.precision == "float32"
    short = load_recipe(overrides=[*CACHED, "train.precision=float8"]).config
    assert steps_of(short)["encode_images"].config.precision == "bfloat16"


def test_without_features_all_is_as_it_was():
    config = load_recipe().config
    assert "encode_images" not in config.identity()
    assert "encode_images" in load_recipe(overrides=CACHED).config.identity()
    assert steps_of(config)["train"].inputs.keys() == {"model", "tokenized", "bins"}
    assert load_recipe(overrides=["encode_images=null"]).differs == {}


def test_what_makes_the_raw_rows():
    source = steps_of(load_recipe("embedded", ["data=/somewhere"]).config)
    assert "embedded_data" not in source and sources_of(source["convert"]) == {"raw": "raw"}
    steps = steps_of(load_recipe("embedded").config)
    assert [*steps][:3] == ["embedded_data", "convert", "embedded_model"]
    assert sources_of(steps["convert"]) == {"raw": "embedded_data"}
    assert sources_of(steps["embedded_model"]) == {"samples": "convert"}


@pytest.mark.parametrize("part", ["vision", "merger"])
def test_a_trained_encoder_is_not_computed_once(part, tmp_path):
    for model in ([], [f"model={tiny_hf_dir()}"]):
        overrides = [line for line in CACHED if f"train.{part}" not in line]
        words = (
            rf"train\.{part}\.frozen=false changes what they become; set train\.{part}\.frozen=true, or encode_images"
        )
        with pytest.raises(InputError, match=words):
            Plan.open(load_recipe(overrides=[*overrides, *model]), tmp_path)


def test_a_model_of_text_alone_has_nothing_to_encode(tmp_path):
    overrides = [*CACHED, f"model={text_hf_dir()}"]
    with pytest.raises(InputError, match="a qwen3 model has no vision encoder for it; set encode_images=null"):
        Plan.open(load_recipe(overrides=overrides), tmp_path)


def test_features_leave_nothing_to_deal(tmp_path):
    with pytest.raises(InputError, match=r"set execution\.parallel\.vision=first_rank, or encode_images=null"):
        Plan.open(load_recipe(overrides=[*CACHED, "execution.parallel.vision=dealt"]), tmp_path)


ADAPTED = ["train.adapter.rank=4", "train.adapter.alpha=8"]


def test_an_adapter_to_go_on_from_is_an_input_of_the_training(tmp_path):
    (tmp_path / "start").mkdir()
    tensors = {f"base_model.model.q_proj.lora_{which}.weight": np.ones((4, 4), "f4") for which in "AB"}
    save_file(tensors, tmp_path / "start" / ADAPTER_WEIGHTS)
    written = json.dumps(peft_config(AdapterConfig(rank=4, alpha=8), ["q_proj"], []))
    (tmp_path / "start" / ADAPTER_CONFIG).write_text(written)
    started = [*ADAPTED, f"start_adapter={tmp_path / 'start'}"]
    recipe = load_recipe(overrides=started)
    assert recipe.config.identity()["start_adapter"] == str(tmp_path / "start")
    plan = Plan.open(recipe, tmp_path)
    training = plan.step("train")
    assert training.inputs["adapter"] is plan.given["adapter"] and "start" not in str(training.config)
    without = load_recipe(overrides=ADAPTED).config
    assert "start_adapter" not in without.identity()
    assert "adapter" not in steps_of(without)["train"].inputs


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["start_adapter={start}"], r"start_adapter=.* and train\.adapter is null; set train\.adapter"),
        ([*ADAPTED, "start_adapter={start}"], r"start_adapter=.* has no adapter_config\.json"),
        ([*ADAPTED, "start_adapter=nowhere"], "start_adapter 'nowhere' is not a directory here"),
    ],
)
def test_an_adapter_that_is_none_is_refused_before_anything(overrides, words, tmp_path):
    with pytest.raises(InputError, match=words):
        Plan.open(load_recipe(overrides=[text.format(start=tmp_path) for text in overrides]), tmp_path)


def test_what_answers_for_adapters_is_the_merged_model_or_the_base_with_them_beside_it():
    merged, beside = (
        steps_of(load_recipe("embedded", [*ADAPTED, *more]).config) for more in ((), ("evaluate.adapter=beside",))
    )
    assert sources_of(merged["answer"]) == {"hf": "export", "samples": "convert"}
    source = {"hf": "embedded_model", "samples": "convert", "tokenized": "tokenize"}
    assert sources_of(beside["answer"]) == source | {"adapter": "export"}
    assert sources_of(beside["answer_base"]) == sources_of(merged["answer_base"]) == source
    assert beside["answer"].config == merged["answer"].config  # the same questions
    for name in ("evaluate", "evaluate_base"):
        assert beside[name].config == merged[name].config
        assert "adapter" not in merged[name].config.model_dump()
    assert "adapter" not in load_recipe("embedded").config.identity()["evaluate"]


def test_an_adapter_beside_the_base_needs_an_adapter_and_our_decoder():
    assert "and train.adapter is null; try evaluate.adapter=merged" in _error("evaluate.adapter=beside")
    refused = _error("evaluate.adapter=beside", *ADAPTED, "train.adapter.kind=dora", "evaluate.engine=vllm")
    assert "evaluate.adapter=beside is not for evaluate.engine=vllm: it is a DoRA, which vLLM has not" in refused


def test_adapters_of_experts_do_not_answer_beside_the_base():
    targets = ["train.adapter.targets=[experts]", "train.adapter.rank=8"]
    experts = ["model.family=qwen3_vl_moe", *ADAPTED, *targets, "evaluate.adapter=beside"]
    with pytest.raises(InputError, match=r"evaluate.adapter=beside, and .* set evaluate.adapter=merged"):
        check_model(load_recipe(overrides=experts).config)


@pytest.mark.parametrize(
    ("recipe", "settings", "name"),
    [
        ("embedded", [], "embedded"),
        ("embedded", ["data=/data/My Receipts (v2)/"], "my-receipts-v2"),
        ("embedded", ["data=s3://bucket/sets/charts"], "charts"),
        ("embedded", ["data=HuggingFaceM4/the_cauldron"], "the-cauldron"),
        ("embedded", ["data=/data/embedded"], "embedded-data"),
        ("embedded", ["data=/"], "data"),
        ("embedded", ["data=/data/\u56fe"], "data"),
        ("embedded", ["data=/data/charts", "name=mine"], "mine"),
        ("adapter", ["data=/data/charts"], "charts"),
        ("cauldron", ["data=/data/charts"], "cauldron"),
    ],
)
def test_own_data_never_go_under_the_name_of_embedded_data(recipe, settings, name):
    config = load_recipe(recipe, settings).config
    assert config.mlflow_name == f"athanor-{name}" == release_config(config).name


def test_a_relative_path_has_the_name_of_its_directory(tmp_path, monkeypatch):
    (tmp_path / "pets").mkdir()
    monkeypatch.chdir(tmp_path / "pets")
    assert load_recipe(overrides=["data=."]).config.mlflow_name == "athanor-pets"


def test_every_recipe_whose_data_a_stage_makes_is_known_as_one():
    configs = [load_recipe(name).config for name in known_recipes()]
    assert sorted(c.name for c in configs if not isinstance(c.data, str)) == sorted(EMBEDDED_RECIPES)


ONE = {"name": "a", "source": "/a", "builder": "llava", "share": 2}
OTHER = {"name": "b", "source": "s3://bucket/b", "builder": "the_cauldron", "options": {"turns": "chat"}}
NO_BUILDER = ("convert.builder=null", "convert.options={}")


def test_several_sources_are_inputs_of_convert_and_their_shares_are_the_bins():
    config = load_recipe("embedded", NO_BUILDER, {"data": [ONE, OTHER]}).config
    steps = steps_of(config)
    assert sources_of(steps["convert"]) == {"raw-a": "raw-a", "raw-b": "raw-b"} and "embedded_data" not in steps
    dumped = steps["convert"].config.model_dump(mode="json")
    assert dumped["sources"]["b"]["options"] == {"turns": "chat"} and "/a" not in str(dumped)
    assert steps["plan_bins"].config.shares == {"a": 2.0}
    assert release_config(config).datasets == ["/a", "s3://bucket/b"] and config.mlflow_name == "athanor-a-b"


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        ([ONE, OTHER], (), "convert.builder=the_cauldron belongs to one source, and data lists 2"),
        ([ONE, {**OTHER, "name": "a"}], NO_BUILDER, "two sources of data have the same name: a, a; rename one"),
        ([{**ONE, "builder": None}], NO_BUILDER, "the source a of data has no builder"),
        ([{**ONE, "name": "a_b"}], NO_BUILDER, "data.0.name='a_b' "),
        ([{**ONE, "bulder": "llava"}], NO_BUILDER, "unknown key data.0.bulder; did you mean data.0.builder?"),
        (
            [{**OTHER, "options": {"turn": 1}}],
            NO_BUILDER,
            "data.0: options.turns of builder the_cauldron is missing",
        ),
        ([{**ONE, "source": "s3://me:secret@host/x"}], NO_BUILDER, "the source of data a"),
        ("/a", NO_BUILDER, "convert.builder is missing"),
        ("/a", ("plan_bins.shares={a: 1}",), "plan_bins.shares={'a': 1.0} is filled in from data; give each source"),
        ([], NO_BUILDER, "data"),
    ],
)
def test_sources_that_do_not_fit_are_refused(data, settings, words):
    with pytest.raises(InputError) as caught:
        load_recipe("embedded", settings, {"data": data})
    assert words in str(caught.value) and "secret" not in str(caught.value) and "\n" not in str(caught.value)
