"""Journals are delivered in order, once, whatever happens to MLflow, to the answer, or to the process."""

import functools
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import filelock
import pytest
from mlflow.exceptions import MlflowException

import stages.tracking
import stages.tracking_apply
from stages.tracking import Tracker, connect, replay_waiting
from stages.tracking_journal import JOURNAL, State, journal_of
from stages.tracking_sender import Delivery, Sender
from tests.helpers.tracked_run import EXPERIMENT, Nobody, holdings, open_tracker, tell_a_run, timed_row


@pytest.fixture(autouse=True)
def no_thread(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(stages.tracking, "sender_of", lambda root: Nobody())


class Faulty:
    """A client whose calls fail by a die: before they reach MLflow, or after, when only the answer is lost."""

    def __init__(self, client, die: random.Random) -> None:
        self._client, self._die = client, die

    def __getattr__(self, name: str):
        method = getattr(self._client, name)

        @functools.wraps(method)
        def call(*args, **kwargs):
            fate = self._die.random()
            if fate < 0.12:
                raise MlflowException("API request failed: connection refused")
            answer = method(*args, **kwargs)
            if fate < 0.24:
                raise ConnectionError(f"the answer of {name} was lost")
            return answer

        return call


def deliver_patiently(root: Path, key: str, most: int = 3000) -> int:
    """Deliver with a fresh process's memory after every failure; returns the number of failures."""
    journal = journal_of(root, key)
    for failures in range(most):
        delivery = Delivery(root, journal)
        try:
            delivery.run()
        except (MlflowException, ConnectionError):
            continue
        assert journal.settle(delivery.state)
        return failures
    raise AssertionError(f"not delivered after {most} tries")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages.tracking, "sender_of", lambda root: Nobody())
        tell_a_run(root, "one")
        assert deliver_patiently(root, "one") == 0
    return holdings(connect(root), "one")


def test_what_is_told_is_held(undisturbed):
    assert [point[0] for point in undisturbed["points"]["loss"]] == list(range(1, 13))
    assert undisturbed["status"] == "FINISHED" and undisturbed["runs"] == 1
    assert undisturbed["aliases"] == {"candidate": 1, "champion": 1}


@pytest.mark.parametrize("seed", [1, 2])
def test_calls_that_fail_and_answers_that_are_lost_change_nothing(tmp_path, monkeypatch, undisturbed, seed):
    die = random.Random(seed)
    monkeypatch.setattr(stages.tracking_apply, "connect", lambda root: Faulty(connect(root), die))
    tell_a_run(tmp_path, "one")
    assert deliver_patiently(tmp_path, "one") > 10
    assert holdings(connect(tmp_path), "one") == undisturbed


class Slow:
    """A client that takes its time for every answer, as MLflow's server does that checks a password each time."""

    def __init__(self, client) -> None:
        self._client = client

    def __getattr__(self, name: str):
        time.sleep(0.15)
        return getattr(self._client, name)


def test_a_slow_server_is_waited_for_as_long_as_it_answers(tmp_path, monkeypatch):
    connect(tmp_path)  # makes the tables, which is no answer
    monkeypatch.setattr(stages.tracking_apply, "connect", lambda root: Slow(connect(root)))
    tell_a_run(tmp_path, "slow")
    sender, journal = Sender(tmp_path), journal_of(tmp_path, "slow")
    last = journal.count_waiting()
    delivered, deliver = [], Delivery._deliver

    def timed(self, group) -> None:
        began = time.monotonic()
        deliver(self, group)
        delivered.append(time.monotonic() - began)

    monkeypatch.setattr(Delivery, "_deliver", timed)
    sender.submit(journal)
    patience = 1.0
    assert sender.wait(journal, last, patience) == 0
    assert max(delivered) > patience, f"no entry took longer than the patience: {delivered}"


def test_a_resumed_training_gives_one_point_a_step(tmp_path, undisturbed):
    tracker = open_tracker(tmp_path, "one")
    for step in range(1, 9):
        tracker._log_rows([timed_row(step)])
    Delivery(tmp_path, tracker.journal).run()
    retrained = [timed_row(step).model_copy(update={"time_ms": 1_800_000_000_000 + step}) for step in range(5, 9)]
    tracker._log_rows(retrained)  # killed at step 8, its checkpoint was of step 4
    tell_a_run(tmp_path, "one")
    deliver_patiently(tmp_path, "one")
    assert holdings(connect(tmp_path), "one")["points"] == undisturbed["points"]


def test_what_was_not_sent_live_is_replayed(tmp_path, undisturbed):
    tell_a_run(tmp_path, "one", live=range(3, 6))
    deliver_patiently(tmp_path, "one")
    points = holdings(connect(tmp_path), "one")["points"]
    assert {name: sorted(values) for name, values in points.items()} == undisturbed["points"]


def test_a_lost_state_or_another_store_get_everything_again_and_once(tmp_path, monkeypatch, undisturbed):
    tracker = tell_a_run(tmp_path, "one")
    Delivery(tmp_path, tracker.journal).run()
    tracker.journal.save_state(State())
    delivery = Delivery(tmp_path, tracker.journal)
    delivery.run()
    assert delivery.sent > 10 and holdings(connect(tmp_path), "one") == undisturbed
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    delivery = Delivery(tmp_path, tracker.journal)
    delivery.run()
    assert delivery.sent > 10 and holdings(connect(tmp_path), "one")["points"] == undisturbed["points"]


def test_a_run_that_mlflow_does_not_know_any_more_is_found_again(tmp_path):
    tracker = open_tracker(tmp_path, "one")
    delivery = Delivery(tmp_path, tracker.journal)
    delivery.run()
    run_id, delivery.state.run_id = delivery.state.run_id, "0" * 32
    tracker.journal.save_state(delivery.state)
    tracker._log_rows([timed_row(1)])
    delivery = Delivery(tmp_path, tracker.journal)
    delivery.run()
    assert delivery.state.run_id == run_id and connect(tmp_path).get_run(run_id).data.metrics["loss"] == 1.0


def test_a_late_double_of_the_run_is_removed_at_its_end(tmp_path):
    tracker = open_tracker(tmp_path, "one")
    delivery = Delivery(tmp_path, tracker.journal)
    delivery.run()
    client, state = connect(tmp_path), delivery.state
    marks = {"athanor.identity": "one", "athanor.creation": state.opened["creation"]}
    client.create_run(state.experiment_id, tags=marks)  # a request that arrived after a second one was answered
    tracker.finish("FINISHED")
    delivery.run()
    (run,) = client.search_runs([state.experiment_id])
    assert run.info.run_id == state.run_id


def test_sync_and_the_next_run_send_what_waits_in_the_order_of_its_making(tmp_path, monkeypatch, capsys):
    from flows.cli import main

    tell_a_run(tmp_path, "one")
    tell_a_run(tmp_path, "two")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        assert main(["sync", "--root", str(tmp_path)]) == 1
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 and all(" 0 entries sent, 19 wait: MlflowException" in line for line in lines)
    assert main(["sync", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "embedded: 19 entries sent\n" * 2
    assert main(["sync", "--root", str(tmp_path)]) == 0 and "nothing waits" in capsys.readouterr().out
    assert not list(tmp_path.glob(f"tracking/*/{JOURNAL}"))
    client = connect(tmp_path)
    runs = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id], order_by=["start_time"])
    assert [run.data.tags["athanor.identity"] for run in runs] == ["one", "two"]
    aliases = {alias: int(v) for alias, v in client.get_registered_model("athanor-test").aliases.items()}
    assert aliases == {"champion": 1, "candidate": 2}


def _open_and_die(root: str) -> None:
    stages.tracking.sender_of = lambda root: Nobody()
    tracker = open_tracker(Path(root), "killed")
    tracker._log_rows([timed_row(1), timed_row(2)])
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_run_gets_its_end(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_open_and_die, args=(str(tmp_path),))
    process.start()
    process.join()
    (one,) = replay_waiting(tmp_path)
    assert (one.sent, one.waiting, one.problem) == (3, 0, "")
    run = connect(tmp_path).get_run(journal_of(tmp_path, "killed").load_state().run_id)
    assert run.info.status == "KILLED" and run.data.metrics["loss"] == 0.5
    assert replay_waiting(tmp_path) == []


def test_a_running_one_is_left_alone_and_not_ended(tmp_path):
    tracker = open_tracker(tmp_path, "alive")
    tracker._log_rows([timed_row(1)])
    other = filelock.FileLock(tracker.journal.dir / "send.lock")  # as another process has it
    other.acquire()
    (one,) = replay_waiting(tmp_path)
    assert one.is_sending and one.waiting == 2 and one.problem == ""
    other.release()
    (one,) = replay_waiting(tmp_path)
    assert one.sent == 2
    run_id = tracker.journal.load_state().run_id
    assert connect(tmp_path).get_run(run_id).info.status == "RUNNING"


def test_a_line_cut_by_a_crash_is_passed_over(tmp_path):
    tracker = open_tracker(tmp_path, "cut")
    tracker._log_rows([timed_row(1)])
    whole = tracker.journal.path.read_bytes()
    with tracker.journal.path.open("ab") as file:
        file.write(b'{"n": 3, "time_ms": 1, "op": "metr')
    assert [entry.number for entry in tracker.journal.waiting(State())] == [1, 2]
    Tracker(tmp_path, "cut")._log_rows([timed_row(2)])
    assert tracker.journal.path.read_bytes().startswith(whole)
    entries = list(tracker.journal.waiting(State()))
    assert [entry.number for entry in entries] == [1, 2, 3] and entries[2].data["rows"][0]["step"] == 2


def _append_many(root: str, who: int) -> None:
    stages.tracking.sender_of = lambda root: Nobody()
    for step in range(40):
        journal_of(Path(root), "shared").append("metrics", {"rows": [], "who": who, "step": step})


def test_two_processes_write_one_journal(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_append_many, args=(str(tmp_path), who)) for who in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    entries = list(journal_of(tmp_path, "shared").waiting(State()))
    assert [entry.number for entry in entries] == list(range(1, 81))
    for who in (1, 2):
        assert [entry.data["step"] for entry in entries if entry.data["who"] == who] == list(range(40))


def test_no_address_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/canary-db.db")
    tracker = tell_a_run(tmp_path, "one")
    Delivery(tmp_path, tracker.journal).run()
    for path in (tmp_path / "tracking").rglob("*.json*"):
        assert "canary-db" not in json.dumps(path.read_text())
