"""Slots of named limits on a real server: the wait is reported, leases are renewed, dead holders'
slots are taken over."""

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import flows  # noqa: F401  sets what Prefect reads at its import

# isort: split
import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.events.worker import EventsWorker
from prefect.exceptions import PrefectHTTPStatusError
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from dataset_builders.errors import InputError
from flows.pipeline import limits
from flows.pipeline.limits import HOST_LIMIT, create_limits, has_server, slot_of
from flows.pipeline.run_record import RunRecord, read_runs
from stages.shared.launchers.config import ClusterConfig
from tests.helpers.patience import at_most
from tests.helpers.service import wait_for


@pytest.fixture(scope="module")
def api():
    """Start a Prefect server that is not a temporary server of this process."""
    server = SubprocessASGIServer()
    server.start()
    try:
        yield server.api_url
    finally:
        EventsWorker.drain_all(at_exit=False)  # later tests use another server
        server.stop()


@pytest.fixture
def server(api, monkeypatch):
    monkeypatch.setattr(limits, "TRY_SECONDS", 0.1)
    with temporary_settings({PREFECT_API_URL: api}):
        yield api


@pytest.fixture
def name(server) -> str:
    """Return the name of a limit that no other test uses."""
    return f"gpu-{uuid.uuid4().hex[:8]}"


def read(name: str):
    with get_client(sync_client=True) as client:
        return client.read_global_concurrency_limit_by_name(name)


def in_a_run(work: Callable[[], None]) -> None:
    """Call a function in a flow run, because only a flow run's slot has a record."""
    flow(work, name="holder", flow_run_name="the holder", validate_parameters=False)()


def in_thread(name: str, root: Path, api: str) -> tuple[threading.Thread, threading.Event]:
    """Ask for a slot in another thread. Return the thread, and an event that is set when the thread has the slot."""
    got = threading.Event()

    def work() -> None:
        with temporary_settings({PREFECT_API_URL: api}), slot_of(name, root):
            got.set()

    thread = threading.Thread(target=work, daemon=True)  # a test that fails must not wait for it
    thread.start()
    return thread, got


def test_without_a_server_no_slot_is_asked_for(tmp_path):
    assert not has_server()
    with slot_of("gpu-host", tmp_path):
        assert read_runs(tmp_path) == []


def refused(status: int) -> PrefectHTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1/api")
    response = httpx.Response(status, json={}, request=request)
    return PrefectHTTPStatusError("refused", request=request, response=response)


@pytest.mark.parametrize(
    ("statuses", "pauses", "is_given_up"),
    [([503] * 4, 4, False), ([503] * 5, 4, True), ([423], 0, True)],
    ids=["busy for a moment", "busy for long", "another answer"],
)
def test_a_server_that_is_busy_writing_is_asked_again_at_once(statuses, pauses, is_given_up, monkeypatch):
    """Prefect's client would wait two seconds between two tries."""
    slept, left = [], [refused(status) for status in statuses]
    monkeypatch.setattr(limits, "time", SimpleNamespace(sleep=slept.append))

    def call() -> None:
        assert PREFECT_CLIENT_MAX_RETRIES.value() == 0
        if left:
            raise left.pop()

    with pytest.raises(PrefectHTTPStatusError) if is_given_up else contextlib.nullcontext():
        limits._promptly(call)
    assert not left and len(slept) == pauses and sum(slept) < 1
    assert PREFECT_CLIENT_MAX_RETRIES.value() > 0


def test_limits_are_made_once_and_a_persons_change_stays(server):
    with get_client(sync_client=True) as client, contextlib.suppress(Exception):
        client.delete_global_concurrency_limit_by_name(HOST_LIMIT)
    create_limits({})
    assert read(HOST_LIMIT).limit == 1
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(HOST_LIMIT, 3)
    create_limits({})
    assert read(HOST_LIMIT).limit == 3
    create_limits({HOST_LIMIT: 2})
    assert read(HOST_LIMIT).limit == 2
    with pytest.raises(InputError, match="--limit gpu-host=0"):
        create_limits({HOST_LIMIT: 0})


def test_the_second_waits_for_the_first_and_says_for_what(name, server, tmp_path, caplog):
    caplog.set_level(logging.INFO, "athanor.limits")
    waiting = []

    def hold() -> None:
        with slot_of(name, tmp_path):
            assert read(name).active_slots == 1
            waiting.append(in_thread(name, tmp_path, server))
            said = f"waiting for a slot of the concurrency limit '{name}': 1 of 1 in use, by the holder"
            wait_for(lambda: said in caplog.text, 30, "line about the wait")
            assert not waiting[0][1].is_set()

    in_a_run(hold)
    ((thread, got),) = waiting
    assert got.wait(at_most(30))
    thread.join()
    (record,) = read_runs(tmp_path)
    assert read(name).active_slots == 0 and record.lease_id is record.limit is None


def test_a_limit_that_is_not_there_is_made_with_one_slot(name, tmp_path, caplog):
    caplog.set_level(logging.INFO, "athanor.limits")
    with slot_of(name, tmp_path):
        assert read(name).limit == 1
    assert f"`athanor up --limit {name}=N`" in caplog.text


def test_a_slot_is_given_back_when_the_work_fails(name, tmp_path):
    with pytest.raises(RuntimeError), slot_of(name, tmp_path):
        raise RuntimeError
    assert read(name).active_slots == 0


def test_a_limit_of_no_slots_is_an_error_that_says_what_to_do(name, tmp_path):
    create_limits({name: 1})
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(name, 0)
    with pytest.raises(InputError, match=f"athanor up --limit {name}=1"), slot_of(name, tmp_path):
        pass


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_the_slot_of_a_dead_holder_is_taken_over_at_once(name, server, tmp_path, host):
    """A holder of another host cannot be seen to be dead; its lease expires."""

    def hold() -> None:
        with slot_of(name, tmp_path):
            (record,) = read_runs(tmp_path)
            owner = {"pid_started": 1.0, "host": record.host if host == "here" else "elsewhere"}  # it is long gone
            path = tmp_path / "service" / "runs" / f"{record.flow_run_id}.json"
            path.write_text(record.model_copy(update=owner).model_dump_json())
            thread, got = in_thread(name, tmp_path, server)
            if host == "here":
                assert got.wait(at_most(30))
            else:
                assert not got.wait(1)
        thread.join()

    in_a_run(hold)


def test_a_slot_that_was_lost_is_taken_again_and_the_work_goes_on(name, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "RENEW_SECONDS", 0.2)

    def record() -> RunRecord:
        (only,) = read_runs(tmp_path)
        return only

    def hold() -> None:
        with slot_of(name, tmp_path):
            before = record()
            with get_client(sync_client=True) as client:  # as the server does with a lease that was not renewed in time
                client.release_concurrency_slots_with_lease(uuid.UUID(before.lease_id))
            wait_for(lambda: read(name).active_slots == 1 and record().lease_id != before.lease_id, 30, "slot again")

    in_a_run(hold)
    assert read(name).active_slots == 0


def test_a_server_that_is_away_does_not_end_the_work(name, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "athanor.limits")
    monkeypatch.setattr(limits, "RENEW_SECONDS", 0.2)

    def away(**_):
        raise OSError("connection refused")

    with slot_of(name, tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr(limits, "get_client", away)
            wait_for(lambda: "could not be renewed, the job goes on" in caplog.text, 10, "warning")
        wait_for(lambda: "the slot of" in caplog.text and "is held" in caplog.text, 30, "renewal")
    assert read(name).active_slots == 0


def test_a_slot_that_another_job_has_taken_is_said_and_taken_again_later(name, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "athanor.limits")
    monkeypatch.setattr(limits, "RENEW_SECONDS", 0.2)

    def hold() -> None:
        with slot_of(name, tmp_path), get_client(sync_client=True) as client:
            other = None
            while other is None:  # the renewal may be first
                client.release_concurrency_slots_with_lease(uuid.UUID(read_runs(tmp_path)[0].lease_id))
                with contextlib.suppress(PrefectHTTPStatusError):
                    answer = client.increment_concurrency_slots_with_lease([name], 1, "concurrency", 60.0)
                    other = uuid.UUID(answer.json()["lease_id"])
            wait_for(lambda: "another job took it while the server was away" in caplog.text, 30, "warning")
            client.release_concurrency_slots_with_lease(other)
            wait_for(lambda: "is held" in caplog.text, 30, "slot again")

    in_a_run(hold)
    assert read(name).active_slots == 0


def test_where_a_job_runs_names_its_limit():
    assert ClusterConfig().limit == HOST_LIMIT == "gpu-host"
    assert ClusterConfig(launcher="slurm", job_file="jobs/long.sbatch").limit == "slurm:long"
