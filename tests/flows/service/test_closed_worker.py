"""A worker takes only the deployment's name from Prefect, and no code or command."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from uuid import uuid4

import flows  # noqa: F401  sets what Prefect reads at its import

# isort: split
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
from prefect.exceptions import PrefectHTTPStatusError
from prefect.results import ResultRecord, ResultRecordMetadata
from prefect.runner._state_proposer import StateProposer
from prefect.serializers import PickleSerializer
from prefect.states import Cancelling, Completed
from prefect.utilities.dispatch import lookup_type
from prefect.workers import process
from prefect.workers.base import BaseWorker

from dataset_builders.errors import InputError
from dataset_builders.storage.row_objects import DATA_STORES_VARIABLE
from flows.pipeline.prefect_changes import refuse_stored_results
from flows.pipeline.processes import ROOT_VARIABLE
from flows.pipeline.run_record import RunRecord
from flows.service.closed_worker import TYPE, ClosedConfiguration, ClosedWorker, entrypoint_to_run
from flows.service.deployments import JOB_TEMPLATE, OFFERS, make_deployment, register
from flows.tracking.servers import POOL
from stages.shared.launchers.processes import Owner

pytestmark = pytest.mark.promise(
    "A page of another origin, another user of the machine, and somebody with the password run no command."
)


def run(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{"id": uuid4(), "deployment_id": uuid4(), "job_variables": {}, **changes})


def deployment(offer=OFFERS[0], **changes: object) -> SimpleNamespace:
    """Return a registered deployment as the server sends it."""
    made = make_deployment(offer, POOL)
    same = {"name": offer.name, "entrypoint": made.entrypoint, "job_variables": {}, "pull_steps": None}
    return SimpleNamespace(**{**same, "storage_document_id": None, **changes})


def pool(template: object = JOB_TEMPLATE) -> SimpleNamespace:
    return SimpleNamespace(name=POOL, base_job_template=template)


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.name)
def test_what_is_offered_is_run_by_the_entrypoint_that_is_registered(offer):
    assert entrypoint_to_run(run(), deployment(offer), pool()) == make_deployment(offer, POOL).entrypoint


OTHER_COMMAND = {**JOB_TEMPLATE, "job_configuration": {"command": "x"}}
REFUSED = {
    "no deployment": ({}, None, pool(), "deployment none is not athanor's"),
    "another name": ({}, {"name": "evil"}, pool(), "deployment evil is not athanor's, nothing was run"),
    "an entrypoint": ({}, {"entrypoint": "os.system"}, pool(), "entrypoint='os.system' is not as registered"),
    "pull steps": ({}, {"pull_steps": [{"run": "x"}]}, pool(), "pull_steps=[{'run': 'x'}] is not as registered"),
    "storage": ({}, {"storage_document_id": "1"}, pool(), "storage_document_id='1' is not as registered"),
    "its variables": ({}, {"job_variables": {"env": {}}}, pool(), "job_variables={'env': {}} is not as registered"),
    "the run's": ({"job_variables": {"command": "x", "env": {}}}, {}, pool(), "job variables (command, env), which"),
    "the pool": ({}, {}, pool(OTHER_COMMAND), "its job template is not as registered"),
    "no template": ({}, {}, pool({}), "its job template is not as registered"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_differs_is_refused_in_one_line(what):
    of_run, of_deployment, of_pool, words = REFUSED[what]
    with pytest.raises(InputError) as caught:
        entrypoint_to_run(run(**of_run), None if of_deployment is None else deployment(**of_deployment), of_pool)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_job_is_the_same_whatever_template_and_values_say():
    template = {
        "job_configuration": {"command": "{{ command }}", "env": {"A": "1"}, "working_dir": "/"},
        "variables": {},
    }
    values = {"command": "touch /tmp/x", "env": {"ATHANOR_DATA_DIRS": "/"}, "env.B": "2", "working_dir": "/"}
    made = asyncio.run(ClosedConfiguration.from_template_and_values(template, values))
    assert made == ClosedConfiguration(command=f"{sys.executable} -m flows.service.engine {os.getpid()}")
    assert made.env == {} and made.working_dir is None


def test_the_worker_is_found_by_its_type_and_looks_for_hooks_in_our_flows_alone():
    assert lookup_type(BaseWorker, TYPE) is ClosedWorker and lookup_type(BaseWorker, "process") is process.ProcessWorker
    found = asyncio.run(process.load_flow_from_flow_run(run()))
    assert found in [offer.flow for offer in OFFERS]
    assert not any(offer.flow.on_crashed_hooks or offer.flow.on_cancellation_hooks for offer in OFFERS)


@pytest.mark.parametrize("stores", [None, "", "s3://sets"])
def test_the_rows_of_a_request_may_name_the_stores_of_the_service_alone(stores, monkeypatch):
    async def start(_worker, _run, configuration, task_status=None):
        return configuration.env

    monkeypatch.delenv(DATA_STORES_VARIABLE, raising=False)
    if stores is not None:
        monkeypatch.setenv(DATA_STORES_VARIABLE, stores)
    monkeypatch.setattr(process.ProcessWorker, "run", start)
    made = asyncio.run(worker_of(deployment()).run(run(parameters={}), ClosedConfiguration()))
    assert made[DATA_STORES_VARIABLE] == (stores or "")


def worker_of(there: SimpleNamespace, states: list | None = None) -> ClosedWorker:
    """Return a worker whose server has one deployment, and notes the states that the worker sets."""

    async def read_deployment(_id):
        return there

    async def set_flow_run_state(_run, state, force):
        states.append((state, force))

    worker = object.__new__(ClosedWorker)
    worker._work_pool = pool()
    worker._client = SimpleNamespace(read_deployment=read_deployment, set_flow_run_state=set_flow_run_state)
    return worker


@pytest.mark.promise(
    "A schedule whose stored parameters no longer fit is named by `athanor up` and `athanor status`, and its runs say "
    "why they are refused."
)
def test_a_run_with_parameters_of_an_older_form_says_so_and_starts_no_process(monkeypatch):
    async def start(*_arguments):
        raise AssertionError("a process was started")

    monkeypatch.setattr(process.ProcessWorker, "run", start)
    states, started = [], []
    request = run(parameters={"recipe": "embedded", "config": {}})
    status = SimpleNamespace(started=started.append)
    result = asyncio.run(worker_of(deployment(), states).run(request, ClosedConfiguration(), status))
    ((state, is_forced),) = states
    assert (state.name, state.type.value, is_forced) == ("Refused", "FAILED", True)
    assert state.message.startswith("no parameter is called 'config', only recipe, name, settings, set; edit the")
    assert result.status_code == 0 and isinstance(started[0], InputError)  # not a crash of the worker
    assert request.id not in ClosedWorker.active


@pytest.mark.parametrize(
    ("saved", "message"), [("step 215 saved", "step 215 saved; Retry resumes from it"), ("", "Prefect's own")]
)
def test_a_cancelled_run_says_what_its_training_has_saved(tmp_path, monkeypatch, saved, message):
    states = []

    async def set_flow_run_state(_run, state, force):
        states.append(state)

    cancelled = SimpleNamespace(id=uuid4(), state=Cancelling())
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    record = RunRecord(flow_run_id=str(cancelled.id), saved=saved, **Owner.of_this_process().model_dump())
    (tmp_path / "service" / "runs").mkdir(parents=True)
    (tmp_path / "service" / "runs" / f"{cancelled.id}.json").write_text(record.model_dump_json())
    proposer = StateProposer(client=SimpleNamespace(set_flow_run_state=set_flow_run_state))
    assert asyncio.run(proposer.propose_cancelled(cancelled, {"message": "Prefect's own"}))
    assert [(state.name, state.message) for state in states] == [("Cancelled", message)]


@pytest.mark.full
def test_a_pool_and_deployments_of_before_are_put_right():
    """Such deployments were left by a version without a job template of its own, or made by somebody
    with the password."""
    register()
    open_template = process.ProcessWorker.get_default_base_job_template()
    with get_client(sync_client=True) as client:
        there = client.read_deployment_by_name("prepare-data/prepare-data")
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=open_template, concurrency_limit=5))
        wrong = {"job_variables": {"command": "x"}, "pull_steps": [{"run": {}}], "entrypoint": "os.system"}
        client.update_deployment(there.id, DeploymentUpdate(**wrong))
        register()
        after, own = client.read_deployment(there.id), client.read_work_pool(POOL)
        assert own.base_job_template == JOB_TEMPLATE and own.concurrency_limit == 5
        assert entrypoint_to_run(run(), after, own) == "flows.service.deployments.prepare_data_request"
        for values in ({"command": "x"}, {"env": {"A": "1"}}, {"working_dir": "/"}, {"image": "x"}, {"env.A": "1"}):
            with pytest.raises(PrefectHTTPStatusError, match="422"):
                client.create_flow_run_from_deployment(there.id, job_variables=values)
        client.update_deployment(there.id, DeploymentUpdate(job_variables={"command": "x"}))  # it lets this pass
        with pytest.raises(InputError, match="is not as registered"):
            entrypoint_to_run(run(), client.read_deployment(there.id), own)
        register()


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a stored result was unpickled')",)


def test_no_stored_result_is_read(tmp_path):
    """Whoever may call Prefect's API can set a state with a result at any address, which would be unpickled."""
    refuse_stored_results()
    serializer = PickleSerializer()
    metadata = ResultRecordMetadata(storage_key=str(tmp_path / "record"), serializer=serializer)
    record = {"metadata": json.loads(metadata.dump_bytes()), "result": serializer.dumps(Bomb()).decode()}
    (tmp_path / "record").write_text(json.dumps(record))
    with pytest.raises(InputError, match="names a stored result"):
        Completed(data=metadata).result(_sync=True)
    with pytest.raises(InputError, match="names a stored result"):
        ResultRecord.deserialize_from_result_and_metadata(serializer.dumps(Bomb()), metadata.dump_bytes())


# A fork imports each module. Its parent has imported Prefect, but only the settings of athanor.
IMPORT_EACH = """
import importlib, os, sys
import flows
from prefect.results import ResultRecord
for module in sys.argv[1:]:
    if (pid := os.fork()) == 0:
        importlib.import_module(module)
        print(module, ResultRecord.deserialize.__module__, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
print(ResultRecord.deserialize.__module__)
"""


@pytest.mark.full
def test_every_process_that_runs_a_flow_refuses_them():
    """The engine imports the flow's module; `athanor run` and `sweep` import their own modules."""
    modules = {make_deployment(offer, POOL).entrypoint.rpartition(".")[0] for offer in OFFERS}
    modules |= {"flows.cli.run"}
    command = [sys.executable, "-c", IMPORT_EACH, *sorted(modules)]
    *found, before = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == [f"{module} flows.pipeline.prefect_changes" for module in sorted(modules)]
    assert before.startswith("prefect.")
