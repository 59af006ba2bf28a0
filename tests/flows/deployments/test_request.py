"""Requests: the form is PipelineConfig with every field optional, and a filled-in form becomes a checked recipe."""

import json
import re
from collections.abc import Iterator

import pytest
from prefect.utilities.schema_tools.validation import ValidationError
from prefect.utilities.schema_tools.validation import validate as prefect_validate

from dataset_builders.errors import InputError
from dataset_builders.storage.store import location
from flows.pipeline.config import PipelineConfig
from flows.pipeline.recipe import DEFAULT_RECIPE, load_recipe, submodels
from flows.service.form import form_schema
from flows.service.request import is_recipe_only, resolve_request

pytestmark = pytest.mark.promise(
    "The form, a watched run and MLflow's pages work in headless Chromium; a wrong value is refused with its path."
)


def leaves(schema: dict, path: str = "") -> Iterator[tuple[str, dict]]:
    for name, each in schema["properties"].items():
        dotted = f"{path}{name}"
        if "properties" in each:
            yield from leaves(each, f"{dotted}.")
        else:
            yield dotted, each


def model_leaves(model, path: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = [] if "dict" in str(field.annotation) else submodels(field.annotation)
        yield from model_leaves(inner[0], f"{path}{name}.") if inner else [f"{path}{name}"]


FORM = dict(leaves(form_schema()))


def validate(overrides: dict) -> None:
    """Validate a request as Prefect's server does, with the same schema."""
    whole = {"type": "object", "properties": {"overrides": {**form_schema(), "default": {}}}}
    prefect_validate({"overrides": overrides}, whole, raise_on_error=True)


def error(overrides: dict, recipe: str = DEFAULT_RECIPE, **changes: object) -> str:
    with pytest.raises(InputError) as caught:
        resolve_request(recipe, overrides, location("/tmp/root"), changes)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_form_has_every_field_that_a_request_may_set():
    wanted = {dotted for dotted in model_leaves(PipelineConfig) if not is_recipe_only(dotted)}
    assert FORM.keys() == wanted and len(wanted) > 80
    assert "train.optim.lr" in FORM and "data.num_scans" in FORM and not any("slurm" in dotted for dotted in FORM)


def test_a_field_is_optional_and_says_what_it_is():
    for dotted, field in FORM.items():
        assert "default" not in field and field["title"][0].isupper(), dotted
        assert f"`{dotted}`" in field["description"] and "recipe embedded: `" in field["description"], dotted
        assert len(field["description"].split("`")[0]) > 5, f"{dotted}: no description"
        assert field.get("type") != "boolean", f"{dotted}: drawn as a switch that sends false when nobody touches it"
        assert {"type": "null"} not in field.get("anyOf", []), f"{dotted}: hides the input behind a tab"


def test_nothing_is_required_at_any_depth_and_the_order_is_kept():
    text = json.dumps(form_schema())
    assert '"required"' not in text and "$ref" not in text
    sections = [name for name, _ in sorted(form_schema()["properties"].items(), key=lambda item: item[1]["position"])]
    assert sections[:3] == ["train", "data", "model"] and sections[-1] == "name"


@pytest.mark.parametrize(
    ("dotted", "words"),
    [
        ("train.optim.lr", "over 0, at most 1"),
        ("convert.heldout_fraction", "at least 0, under 1"),
        ("data.num_scans", "at least 10, at most 1,797"),
        ("model.vocab_size", "a multiple of 128"),
        ("name", "of the form `^[a-z0-9]"),
    ],
)
def test_bounds_stand_in_the_description(dotted, words):
    assert words in FORM[dotted]["description"]


def test_choices_are_dropdowns():
    assert FORM["train.precision"]["enum"][:2] == ["float32", "bfloat16"]
    assert FORM["execution.parallel.balance"]["enum"] == [True, False]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train": {"optim": {"lr": 3}}}, "'overrides.train.optim.lr'. Failure reason: 3 is greater than the maximum"),
        ({"tokenize": {"max_pixels": -3}}, "'overrides.tokenize.max_pixels'"),
        ({"train": {"precision": "float16"}}, "'overrides.train.precision'"),
        ({"train": {"num_steps": "many"}}, "'overrides.train.num_steps'"),
        ({"plan_bins": {"mixture": {"a": {"repeats": -1}}}}, "'overrides.plan_bins.mixture.a.repeats'"),
        ({"data": {"num_scans": 5}}, "'overrides.data.num_scans'"),
        ({"train": {"num_step": 3}}, "'num_step' was unexpected"),
    ],
)
def test_prefects_server_refuses_with_the_path(overrides, words):
    with pytest.raises(ValidationError, match=re.escape(words)):
        validate(overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"train": {"optim": {"lr": 0.002}, "vision": None}, "model": None, "tokenize": None},
        {"data": "/data/x", "model": "Qwen/Qwen3-VL-2B-Instruct"},
        {"data": {"seed": 3}, "execution": {"parallel": {"balance": False}}},
        {"tokenize": {"max_pixels": "none"}, "plan_bins": {"max_images": 4, "mixture": {"a": {"weight": None}}}},
    ],
)
def test_prefects_server_takes_what_the_form_sends(overrides):
    validate(overrides)


def test_overrides_become_a_recipe_and_what_differs_is_named():
    asked = {"train": {"optim": {"lr": 0.002}, "num_steps": None}, "data": {"num_scans": 40}, "model": None}
    recipe = resolve_request("embedded", asked, location("/tmp/root"))
    assert recipe.differs == {"train.optim.lr": 0.002, "data.num_scans": 40}
    assert recipe == load_recipe("embedded", ["train.optim.lr=0.002", "data.num_scans=40"])
    assert resolve_request("embedded", {}, location("/tmp/root")) == load_recipe("embedded")


def test_the_word_none_is_null_where_a_field_may_be_null(tmp_path):
    path = {"evaluate": {"max_samples_per_subset": "none"}, "tokenize": {"max_pixels": 2000, "system_prompt": "none"}}
    config = resolve_request("embedded", path, location("/tmp/root")).config
    assert config.evaluate.max_samples_per_subset is None and config.tokenize.system_prompt is None
    assert config.tokenize.max_pixels == 2000
    assert "train.optim.lr='none' should be a valid number" in error({"train": {"optim": {"lr": "none"}}})


def test_a_mapping_of_the_users_own_is_one_value():
    mixture = {"digits_multi": {"weight": None, "repeats": 2}}
    recipe = resolve_request("embedded", {"plan_bins": {"mixture": mixture}}, location("/tmp/root"))
    assert recipe.config.plan_bins.mixture["digits_multi"].repeats == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"execution": {"parallel": {"tp": 4}}}, "execution.parallel.tp=4 does not divide the model's num_kv_heads=2"),
        ({"train": {"optm": {"lr": 1}}}, "unknown key train.optm; did you mean train.optim?"),
        ({"data": "/etc/passwd"}, "data='/etc/passwd'"),
    ],
)
def test_what_only_the_whole_shows_is_one_line(overrides, words):
    assert words in error(overrides)


def test_a_recipe_is_a_name_and_never_a_path(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: x")
    known = "one of adapter, cauldron, easy_vqa, embedded"
    assert f"recipe={str(mine)!r} is not known; {known}" in error({}, recipe=str(mine))
