"""The schedules whose runs would be refused are told before the night, each with the reason."""

import re

import pytest

from dataset_builders.errors import InputError
from flows.service import schedules
from flows.service.schedules import check_parameters, refused_schedules

pytestmark = pytest.mark.promise(
    "A schedule whose stored parameters no longer fit is named by `athanor up` and `athanor status`, and its runs say "
    "why they are refused."
)
KNOWN = ("recipe", "name", "settings", "set")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"recipe": "embedded", "name": "", "settings": {}, "set": ""}, ""),
        (
            {"setings": {}},
            "no parameter is called 'setings', only recipe, name, settings, set; did you mean 'settings'?",
        ),
        ({"settings": None}, "settings=None is not a mapping"),
        ({"set": ["train.seed=1"]}, "set=['train.seed=1'] is not a text"),
        ({"name": 7}, "name=7 is not a text"),
    ],
)
def test_parameters_with_which_a_flow_cannot_be_called_are_told(parameters, words):
    try:
        check_parameters(parameters, KNOWN)
    except InputError as error:
        assert str(error) == words
    else:
        assert words == ""


def deployment(parameters: dict, *, schedule: dict = {}, known: tuple[str, ...] = KNOWN, **changes: object) -> dict:  # noqa: B006
    """Return a deployment with one schedule, as Prefect's server sends it."""
    one = {"active": True, "slug": "nightly", "schedule": {"cron": "0 2 * * *"}, "id": "1", "parameters": {}}
    schema = {"properties": {name: {} for name in known}}
    same = {"name": "vlm-sft-nightly", "paused": False, "parameters": parameters, "parameter_openapi_schema": schema}
    return {**same, **changes, "schedules": [{**one, **schedule}]}


GRID = (*KNOWN, "grid")


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (deployment({}), None),
        (deployment({"set": "data=/no/place/of/this/service"}), None),  # the state of a run says whether it may
        (deployment({"gone": 1}), "no parameter is called 'gone'"),
        (deployment({}, schedule={"parameters": {"set": "train.gone=1"}}), "unknown key train.gone"),
        (deployment({"set": "train.gone=1"}, schedule={"parameters": {"set": ""}}), None),
        (deployment({"recipe": "gone"}), "recipe='gone' is not known"),
        (deployment({"settings": {"train.seed": -1}}), "train.seed=-1 should be greater than or equal to 0"),
        (deployment({"grid": {"train.seed": [0, -1]}}, known=GRID), "train.seed=-1 should be"),
        (deployment({"grid": {"train.seed": [0, 1]}}, known=GRID), None),
        (deployment({"gone": 1}, schedule={"active": False}), None),
        (deployment({"gone": 1}, paused=True), None),
    ],
)
def test_an_active_schedule_is_named_if_its_runs_would_be_refused(found, words, monkeypatch):
    asked = []
    monkeypatch.setattr(schedules, "ask_prefect", lambda *about: asked.append(about) or [found])
    told = list(refused_schedules("http://here/api", "athanor:word"))
    assert asked == [("http://here/api", "athanor:word", "deployments/filter")]
    assert len(told) == (words is not None)
    if told:
        assert re.fullmatch(r"schedule nightly of vlm-sft-nightly: its runs will be refused: .*; edit the .*", told[0])
        assert words in told[0] and "\n" not in told[0]
