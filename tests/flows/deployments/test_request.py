"""Requests: the form shows what most runs change, and a filled-in form becomes a checked recipe."""

import json
import re

import pytest
from prefect.utilities.schema_tools.validation import ValidationError
from prefect.utilities.schema_tools.validation import validate as prefect_validate

from dataset_builders.errors import InputError
from dataset_builders.storage.store import location
from flows.pipeline.recipe import DEFAULT_RECIPE, load_recipe
from flows.service.deployments import OFFERS, make_deployment
from flows.service.form import settings_schema
from flows.service.request import is_recipe_only, resolve_request

pytestmark = pytest.mark.promise(
    "The form, a watched run and MLflow's pages work in headless Chromium; a wrong value is refused with its path."
)


FORM = settings_schema()["properties"]


def validate(settings: dict) -> None:
    """Validate a request as Prefect's server does, with the same schema."""
    whole = {"type": "object", "properties": {"settings": {**settings_schema(), "default": {}}}}
    prefect_validate({"settings": settings}, whole, raise_on_error=True)


def error(settings: dict, recipe: str = DEFAULT_RECIPE) -> str:
    with pytest.raises(InputError) as caught:
        resolve_request(recipe, "", settings, location("/tmp/root"))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_setting_has_an_empty_box_plain_words_and_its_bounds():
    for dotted, field in FORM.items():
        assert "default" not in field and "anyOf" not in field, f"{dotted}: hides the input behind a tab"
        assert (
            field["title"][0].isupper()
            and field["description"].endswith(f". `{dotted}`")
            and not is_recipe_only(dotted)
        )
    assert FORM["train.optim.lr"]["description"] == "Peak learning rate (over 0, at most 1). `train.optim.lr`"
    assert FORM["convert.heldout_fraction"]["description"].endswith(
        "held out (at least 0, under 1). `convert.heldout_fraction`"
    )
    assert FORM["data"]["description"] == "Directory, file, URL or hub name. `data`"
    assert FORM["train.num_steps"]["description"].startswith("Optimizer updates (over 0"), "null is no value of a box"
    assert "the_cauldron" in FORM["convert.builder"]["enum"]
    assert "$ref" not in json.dumps(settings_schema())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train.optim.lr": 3}, "settings['train.optim.lr']\". Failure reason: 3 is greater than the maximum of 1"),
        ({"tokenize.max_pixels": -3}, "settings['tokenize.max_pixels']"),
        ({"convert.builder": "couldron"}, "settings['convert.builder']"),
        ({"train.num_steps": "many"}, "settings['train.num_steps']"),
        ({"train.num_step": 3}, "'train.num_step' was unexpected"),
    ],
)
def test_prefects_server_refuses_with_the_path(settings, words):
    with pytest.raises(ValidationError, match=re.escape(words)):
        validate(settings)


def test_prefects_server_takes_what_the_form_sends():
    validate({})
    validate({"data": "/data/x", "model": "Qwen/Qwen3-VL-2B-Instruct", "train.optim.lr": 0.002, "train.num_epochs": 2})


def test_lines_and_settings_become_a_recipe_and_what_differs_is_named():
    lines, settings = ["data.num_scans=40", "tokenize.system_prompt=null"], {"train.optim.lr": 0.002, "model": None}
    recipe = resolve_request("embedded", "\n".join(lines), settings, location("/tmp/root"))
    assert recipe.differs == {"train.optim.lr": 0.002, "data.num_scans": 40}
    assert recipe == load_recipe("embedded", ["train.optim.lr=0.002", *lines])
    assert resolve_request("embedded", "", {}, location("/tmp/root")) == load_recipe("embedded")


def test_a_line_that_is_no_key_and_value_is_refused_at_submit():
    schema = make_deployment(OFFERS[0], "athanor")._parameter_openapi_schema.model_dump()
    lines = [
        "train.seed=3 # fifty",
        "tokenize.system_prompt = a = b",
        "evaluate.x={a: [1, 2]}",
        "",
        " a.b=\u2028c",
        "c=",
    ]
    for text in ("", "\n", *lines, "\n".join(lines), "\r\n".join(lines) + "\r\n\n"):
        prefect_validate({"set": text}, schema, raise_on_error=True)
    for text in ("train.seed 3", "train.seed: 3", "# a=b", "--set a=b", "=3", "a=b\nc\nd=e", "a=b " * 40 + "\nc"):
        with pytest.raises(ValidationError, match="field 'set'"):
            prefect_validate({"set": text}, schema, raise_on_error=True)


@pytest.mark.parametrize(
    ("lines", "settings", "point", "field"),
    [
        ("train.seed=3", {"train.seed": 4}, {}, "train.seed"),
        ("train.seed = 3", {}, {"train.seed": 4}, "train.seed"),
        ("data.num_scans=40", {"data": "org/name"}, {}, "data.num_scans"),
        ("", {"train.seed": 4}, {"train.seed": 1}, "train.seed"),
    ],
)
def test_a_field_is_given_once(lines, settings, point, field):
    with pytest.raises(InputError, match=f"^{field} is given twice, or beside the whole"):
        resolve_request("embedded", lines, settings, location("/tmp/root"), point)


def test_a_line_ends_where_the_box_ends_it():
    recipe = resolve_request("embedded", "tokenize.system_prompt=a\u2028b\r\ntrain.seed=3", {}, location("/tmp/root"))
    assert recipe.differs == {"tokenize.system_prompt": "a\u2028b", "train.seed": 3}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"execution.parallel.tp": 4}, "execution.parallel.tp=4 does not divide the model's num_kv_heads=2"),
        ({"train.optm.lr": 1}, "unknown key train.optm; did you mean train.optim?"),
        ({"data": "/etc/passwd"}, "data='/etc/passwd'"),
    ],
)
def test_what_only_the_whole_shows_is_one_line(settings, words):
    assert words in error(settings)


def test_a_recipe_is_a_name_and_never_a_path(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("name: x")
    known = "one of adapter, cauldron, easy_vqa, embedded"
    assert f"recipe={str(mine)!r} is not known; {known}" in error({}, recipe=str(mine))
