"""Deployments for workers and users: registered once, brought up to date, refused in one line."""

import inspect
import json
import subprocess
import sys

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import PrefectHTTPStatusError
from prefect.flows import load_flow_from_entrypoint

from flows.service.deployments import (
    NIGHTLY,
    OFFERS,
    evaluate_request,
    make_deployment,
    prepare_data_request,
    register,
    vlm_sft_request,
)
from flows.service.work import main
from tests.helpers.service import lines
from tests.helpers.small_run import SMALL, runs_of


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture
def served(root, monkeypatch):
    monkeypatch.setenv("ATHANOR_ROOT", str(root))
    return root


def test_five_are_offered_and_each_says_what_it_does():
    assert [offer.name for offer in OFFERS] == ["vlm-sft", NIGHTLY, "prepare-data", "evaluate", "sweep"]
    for offer in OFFERS:
        made = make_deployment(offer, "athanor")
        assert made.enforce_parameter_schema and made.description.startswith("**") and made.tags == ["athanor"]
        assert (
            made.work_pool_name == "athanor"
            and not made.job_variables
            and "root" not in inspect.signature(offer.flow.fn).parameters
        )
        assert bool(made.schedules) == (offer.name == NIGHTLY)
        assert json.dumps(made._parameter_openapi_schema.model_dump())


@pytest.mark.full
def test_an_entrypoint_is_a_module_that_loads_anywhere(tmp_path):
    """A worker starts a flow run in an empty directory, and nothing is downloaded into it."""
    entrypoints = sorted({make_deployment(offer, "athanor").entrypoint for offer in OFFERS})
    code = "import sys; from prefect.flows import load_flow_from_entrypoint as load\n"
    code += "print(sorted(load(e).name for e in sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, *entrypoints], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['evaluate', 'prepare-data', 'sweep', 'vlm-sft']"
    assert load_flow_from_entrypoint("flows.service.deployments.vlm_sft_request").name == "vlm-sft"


@pytest.mark.full
def test_registered_again_it_keeps_what_people_have_set():
    names = register()
    assert "vlm-sft/vlm-sft-nightly" in names and "sweep/sweep" in names
    with get_client(sync_client=True) as client:
        nightly = client.read_deployment_by_name("vlm-sft/vlm-sft-nightly")
        (schedule,) = nightly.schedules
        assert not schedule.active and schedule.schedule.cron == "0 2 * * *"
        assert nightly.global_concurrency_limit.limit == 1
        at_six = CronSchedule(cron="0 6 * * *", timezone="Europe/Berlin")
        asked = {"settings": {"train.num_steps": 7}}
        client.update_deployment_schedule(nightly.id, schedule.id, active=True, schedule=at_six, parameters=asked)
        own = {"parameters": asked, "paused": True, "version": "old"}
        client.update_deployment(nightly.id, DeploymentUpdate(**own))
        assert register() == names
        after = client.read_deployment_by_name("vlm-sft/vlm-sft-nightly")
        (kept,) = after.schedules
        assert kept.active and kept.schedule.cron == "0 6 * * *" and kept.id == schedule.id
        assert kept.parameters == asked
        assert after.parameters == own["parameters"] and after.paused and after.version != "old"
        assert after.id == nightly.id and len(client.read_deployments()) >= len(OFFERS)
        changed = {each.id: each.updated for each in client.read_deployments()}
        register()
        assert {each.id: each.updated for each in client.read_deployments()} == changed, "an update deletes coming runs"


@pytest.mark.full
@pytest.mark.parametrize(
    ("parameters", "words"),
    [({"settings": {"train.gone": 1}}, "'train.gone' was unexpected"), ({"gone": {}}, "'gone' was unexpected")],
)
def test_parameters_that_no_longer_fit_are_told_and_kept(caplog, parameters, words):
    register()
    with get_client(sync_client=True) as client:
        there = client.read_deployment_by_name("evaluate/evaluate")
        with pytest.raises(PrefectHTTPStatusError, match="409"):
            client.create_flow_run_from_deployment(there.id, parameters=parameters)
        older = {"parameters": parameters, "enforce_parameter_schema": False, "version": "old"}
        client.update_deployment(there.id, DeploymentUpdate(**older))
        register()
        assert "deployment evaluate/evaluate keeps default parameters that no longer fit" in caplog.text
        assert words in caplog.text
        now = client.read_deployment(there.id)
        assert now.parameters == older["parameters"] and now.version == there.version, "all else is as registered"
        client.update_deployment(there.id, DeploymentUpdate(parameters={}))
        register()
        assert client.read_deployment(there.id).enforce_parameter_schema
        client.delete_deployment(there.id)


def test_a_worker_needs_an_address_and_a_root(capsys, monkeypatch):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.delenv("ATHANOR_ROOT", raising=False)
    assert main([]) == 2 and capsys.readouterr().out.startswith("PREFECT_API_URL is not set: start `athanor up`")
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    assert main([]) == 2 and capsys.readouterr().out.startswith("ATHANOR_ROOT is not set, so this worker serves no")


@pytest.mark.parametrize("flow", [vlm_sft_request, prepare_data_request, evaluate_request])
def test_a_wrong_request_is_one_line_of_its_state(served, flow):
    state = flow("embedded", settings={"tokenize.max_seq_len": 99999, "train.seed": None}, return_state=True)
    assert state.is_failed()
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(state.state_details.flow_run_id).name == "embedded max_seq_len=99999"
    assert state.message.startswith("recipe embedded with settings: tokenize.max_seq_len=99999 is more than a bin")
    assert "\n" not in state.message and not (served / "artifacts").exists()


def test_without_a_root_nothing_runs(monkeypatch):
    monkeypatch.delenv("ATHANOR_ROOT", raising=False)
    state = vlm_sft_request("embedded", return_state=True)
    assert state.is_failed() and state.message.startswith("ATHANOR_ROOT is not set")


def test_a_wrong_line_says_what_is_allowed(served):
    for line, words in (
        ("train.optim.lr=3", "train.optim.lr=3 should be less than or equal to 1 [peak learning rate]"),
        ("train.optm.lr=1", "unknown key train.optm; did you mean train.optim?"),
        ("train.optim.lr 1", "--set 'train.optim.lr 1' is not of the form a.b=value, for example train.optim.lr=1e-3"),
        ("execution.registry.push_to=me/mine", "cannot be set by a request; put it in a recipe"),
    ):
        state = vlm_sft_request("embedded", set=f"\n {line}\n", return_state=True)
        assert state.name == "Refused" and words in state.message and "\n" not in state.message
    assert not (served / "artifacts").exists()


@pytest.mark.full
def test_prepare_then_evaluate_then_the_whole_then_evaluate(served):
    asked = lines(SMALL)
    prepared = prepare_data_request("embedded", set=asked)
    assert [run["stage"] for run in prepared["stages"]][-3:] == ["contamination", "tokenize", "plan_bins"]
    state = evaluate_request("embedded", set=asked, return_state=True)
    assert (
        state.is_failed() and "there is no exported model of recipe embedded with these settings yet" in state.message
    )
    assert "run the deployment vlm-sft with the same values first" in state.message
    whole = vlm_sft_request("embedded", name=" My  own ", set=asked)
    assert {run["stage"]: run["reused"] for run in whole["stages"]}["plan_bins"] is True
    evaluate_request("embedded", set=asked)  # goes on in the MLflow run, whose name stays
    again = evaluate_request("embedded", set=asked + "\nevaluate.max_new_tokens=3")
    made = {run["stage"]: run["reused"] for run in again["stages"]}
    names = ("answer", "verify", "evaluate", "answer_base", "evaluate_base", "compare", "release")
    assert made == dict.fromkeys(names, False)
    assert "overall" in again["scores"]
    with get_client(sync_client=True) as client:
        names = {run.name for run in client.read_flow_runs()}
    assert "embedded num_scans=40" in " ".join(names) and "My own" in names
    in_mlflow = {run.info.run_name.partition(" num_scans")[0] for run in runs_of(served)}
    assert in_mlflow == {"My own", "embedded"}
