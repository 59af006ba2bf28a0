"""A run is published completely and only once, whatever happens to MLflow, to an answer, or to the process."""

import functools
import json
import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

import flows.tracking.publish
import flows.tracking.run_writer
import flows.tracking.tracker
from flows.cli.main import main
from flows.tracking.publish import Publication
from flows.tracking.record import (
    MlflowState,
    changed,
    load_record,
    publish_lock,
    records_dir,
    samples_path,
    save_learnt,
    waiting_records,
)
from flows.tracking.run_writer import thinned
from flows.tracking.store import connect
from flows.tracking.system import CPU_METRIC, INTERVAL_SECONDS, pause
from flows.tracking.tracker import WAIT_SECONDS, Sender, Tracker, publish_waiting
from tests.helpers.tracked_run import (
    EXPERIMENT,
    FIRST_MS,
    Nobody,
    ServerClock,
    holdings,
    make_artifact,
    open_tracker,
    tell_a_run,
    timed_row,
    write_live,
)
from trainer.contract.names import METRICS_JSONL

pytestmark = pytest.mark.promise(
    "An MLflow that is away for five seconds, in the full tier for a minute, leaves no gap and no double point."
)


@pytest.fixture(autouse=True)
def no_thread(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(flows.tracking.tracker, "sender_of", lambda root: Nobody())


def write_sample(root: Path, key: str, second: int) -> None:
    """Write a sample of the trainer's machine as its thread does."""
    sample = {"step": second, "time_ms": FIRST_MS + 1000 * second, CPU_METRIC: second / 100}
    with samples_path(root, key).open("a") as file:
        file.write(json.dumps(sample) + "\n")


class Faulty:
    """A client whose calls fail at random: before they reach MLflow, or afterwards, so that only the answer is lost."""

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


def publish_patiently(root: Path, key: str, most: int = 3000) -> int:
    """Publish with a new process's memory after every failure, and return the number of failures."""
    for failures in range(most):
        try:
            Publication(root, key).run()
        except (MlflowException, ConnectionError):
            continue
        assert not load_record(root, key).is_waiting()
        return failures
    raise AssertionError(f"not published after {most} tries")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows.tracking.tracker, "sender_of", lambda root: Nobody())
        tell_a_run(root, "one")
        assert publish_patiently(root, "one") == 0
    return holdings(connect(root), "one")


def test_what_is_told_is_held(undisturbed):
    assert [point[0] for point in undisturbed["points"]["loss"]] == list(range(1, 13))
    assert undisturbed["status"] == "FINISHED" and undisturbed["runs"] == 1
    assert undisturbed["aliases"] == {"candidate": 1, "champion": 1}


def test_calls_that_fail_and_answers_that_are_lost_change_nothing(tmp_path, monkeypatch, undisturbed):
    die = random.Random(1)
    monkeypatch.setattr(flows.tracking.publish, "connect", lambda root: Faulty(connect(root), die))
    tell_a_run(tmp_path, "one")
    assert publish_patiently(tmp_path, "one") > 10
    assert holdings(connect(tmp_path), "one") == undisturbed


class Slow:
    """A client that is slow with every answer, like an MLflow server that checks a password each time."""

    def __init__(self, client, clock: ServerClock, seconds: float) -> None:
        self._client, self._clock, self._seconds = client, clock, seconds

    def __getattr__(self, name: str):
        self._clock.answer_after(self._seconds)
        return getattr(self._client, name)


@pytest.mark.parametrize("seconds", [WAIT_SECONDS / 4, 2 * WAIT_SECONDS])
def test_a_slow_server_is_waited_for_as_long_as_it_answers(tmp_path, monkeypatch, seconds):
    clock = ServerClock()
    monkeypatch.setattr(flows.tracking.tracker, "time", clock)
    monkeypatch.setattr(flows.tracking.publish, "connect", lambda root: Slow(connect(root), clock, seconds))
    tell_a_run(tmp_path, "slow")
    sender, began = Sender(tmp_path), clock.monotonic()
    sender.follow("slow")
    is_whole, waited = sender.wait("slow"), clock.monotonic() - began
    clock.end()
    assert is_whole == (seconds < WAIT_SECONDS)
    assert waited > 10 * WAIT_SECONDS if is_whole else waited < seconds
    assert sender.wait("slow"), "what was not waited for is sent all the same"


def test_a_resumed_training_gives_one_point_a_step(tmp_path, undisturbed):
    tracker = open_tracker(tmp_path, "one")
    write_live(tracker, [timed_row(step) for step in range(1, 9)])
    publication = Publication(tmp_path, "one")
    publication.run()
    # The training was killed at step 8, with a checkpoint of step 4.
    retrained = [timed_row(step).model_copy(update={"time_ms": 1_800_000_000_000 + step}) for step in range(5, 9)]
    write_live(tracker, [*map(timed_row, range(1, 5)), *retrained], "w")
    publication.run()
    tell_a_run(tmp_path, "one")
    publish_patiently(tmp_path, "one")
    assert holdings(connect(tmp_path), "one")["points"] == undisturbed["points"]


def steps_held(root: Path, key: str) -> list[int]:
    """Return the steps at which MLflow holds a loss of the run, in order, doubles included."""
    points = connect(root).get_metric_history(load_record(root, key).learnt.run_id, "loss")
    return sorted(point.step for point in points)


def test_a_long_training_gives_the_same_few_points_live_resumed_and_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(flows.tracking.run_writer, "MAX_POINTS", 10)  # of 25 steps: every third
    expected = [1, 3, 6, 9, 10, 12, 15, 18, 21, 24, 25]
    rows = [timed_row(step) for step in range(1, 26)]
    rows[9] = rows[9].model_copy(update={"heldout_loss": 0.5})
    tracker = open_tracker(tmp_path, "long")
    publication = Publication(tmp_path, "long")
    for count in (2, 5, 8):
        write_live(tracker, rows[:count], "w", num_steps=25)
        publication.run()
    assert steps_held(tmp_path, "long") == [1, 3, 6]
    for part, mode in ((rows[:4], "w"), (rows[4:14], "a")):  # killed at step 8, and resumed at step 4
        write_live(tracker, part, mode, num_steps=25)
        publication.run()
    write_live(tracker, rows[14:20], num_steps=25)
    Publication(tmp_path, "long").run()  # of another process, as after an outage
    assert steps_held(tmp_path, "long") == [step for step in expected if step <= 20]
    trained = make_artifact(tmp_path, "train", "d" * 16, stats={"steps": 25})
    (trained.dir / METRICS_JSONL).write_text("".join(row.model_dump_json() + "\n" for row in rows))
    tracker.log_stage(trained)
    Publication(tmp_path, "long").run()
    assert steps_held(tmp_path, "long") == expected
    save_learnt(tmp_path, "long", MlflowState())
    Publication(tmp_path, "long").run()
    assert steps_held(tmp_path, "long") == expected


@pytest.mark.parametrize(("num_steps", "interval", "most"), [(1000, 1, 1000), (100_000, 1, 1001), (7000, 100, 70)])
def test_a_metric_has_about_a_thousand_points(num_steps, interval, most):
    rows = [{"step": step} for step in range(interval, num_steps + 1, interval)]
    chosen = [row["step"] for row in thinned(rows, num_steps)]
    assert len(chosen) == most and chosen[0] == interval and chosen[-1] == num_steps
    pieces = [thinned(rows[start : start + 7], num_steps, start * interval) for start in range(0, len(rows), 7)]
    assert [row["step"] for piece in pieces for row in piece] == chosen


def test_a_day_of_the_machine_has_a_thousand_samples():
    age, samples = 0.0, 0
    while age < 24 * 3600:
        age, samples = age + pause(age), samples + 1
    assert pause(0) == INTERVAL_SECONDS and 900 < samples < 1000


@pytest.fixture
def begun(tmp_path) -> Publication:
    """Publish a run whose training has made its first step."""
    write_live(open_tracker(tmp_path, "one"), [timed_row(1)])
    publication = Publication(tmp_path, "one")
    publication.run()
    return publication


def test_only_new_lines_are_read_and_asked_for(tmp_path, begun, monkeypatch):
    monkeypatch.setattr(begun, "_publish", lambda: pytest.fail("everything was asked for"))
    with (tmp_path / "scratch" / "metrics.jsonl").open("a") as file:
        file.write(timed_row(2).model_dump_json() + "\n")
    write_sample(tmp_path, "one", 10)
    begun.run()
    assert begun.sent == {"recipe": 1, "step": 2, "machine sample": 1}


def test_a_machines_samples_survive_an_outage_and_are_sent_once(tmp_path):
    write_live(open_tracker(tmp_path, "one"), [timed_row(1)])
    for second in (10, 20, 30):
        write_sample(tmp_path, "one", second)
    for _ in range(2):
        Publication(tmp_path, "one").run()
        save_learnt(tmp_path, "one", MlflowState())  # everything that this machine knew is lost
    Publication(tmp_path, "one").run()
    run_id = load_record(tmp_path, "one").learnt.run_id
    points = connect(tmp_path).get_metric_history(run_id, CPU_METRIC)
    assert [(point.step, point.value, point.timestamp) for point in points] == [
        (second, second / 100, FIRST_MS + 1000 * second) for second in (10, 20, 30)
    ]


def test_lost_knowledge_or_another_store_get_everything_again_and_once(tmp_path, monkeypatch, undisturbed):
    tell_a_run(tmp_path, "one")
    Publication(tmp_path, "one").run()
    save_learnt(tmp_path, "one", MlflowState())
    again = Publication(tmp_path, "one")
    again.run()
    assert not again.sent and holdings(connect(tmp_path), "one") == undisturbed
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/other.db")
    other = Publication(tmp_path, "one")
    other.run()
    assert other.sent["step"] == 12 and holdings(connect(tmp_path), "one")["points"] == undisturbed["points"]


def test_a_store_that_was_emptied_meanwhile_gets_the_run_again(tmp_path, begun):
    client, first = connect(tmp_path), load_record(tmp_path, "one").learnt.run_id
    client.delete_run(first)
    write_live(Tracker(tmp_path, "one"), [timed_row(2)])
    begun.run()
    run_id = load_record(tmp_path, "one").learnt.run_id
    assert run_id != first and [point.step for point in client.get_metric_history(run_id, "loss")] == [1, 2]


def test_a_late_double_of_the_run_is_removed_at_its_end(tmp_path, begun):
    client, record = connect(tmp_path), load_record(tmp_path, "one")
    marks = {"mlflow.athanor.identity": "one", "mlflow.athanor.creation": record.creation}
    client.create_run(record.learnt.experiment_id, tags=marks)  # arrived after a second request was answered
    Tracker(tmp_path, "one").finish("FINISHED")
    begun.run()
    (run,) = client.search_runs([record.learnt.experiment_id])
    assert run.info.run_id == record.learnt.run_id


def test_sync_of_a_root_without_runs_is_refused(tmp_path, capsys):
    assert main(["sync", "--root", str(tmp_path / "typo")]) == 2
    assert capsys.readouterr().err == (
        f"athanor: --root {tmp_path / 'typo'} has no record of a run; give the --root of the run that is to be sent\n"
    )


def test_sync_sends_what_waits_in_the_order_of_its_making(tmp_path, monkeypatch, capsys):
    tell_a_run(tmp_path, "two")  # the order of the names is not the order of the runs
    tell_a_run(tmp_path, "one")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        assert main(["sync", "--root", str(tmp_path)]) == 1
        one, two = capsys.readouterr().out.splitlines()
        nothing = "embedded: nothing sent, the rest waits: MlflowException"
        assert nothing in one and nothing in two
    assert main(["sync", "--root", str(tmp_path)]) == 0
    line = "embedded: 1 recipe, 2 stages, 7 files, 12 steps, 1 score table, 1 model, 1 end sent"
    assert sorted(capsys.readouterr().out.splitlines()) == [line, line]
    assert main(["sync", "--root", str(tmp_path)]) == 0 and "nothing is left to send" in capsys.readouterr().out
    client = connect(tmp_path)
    runs = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id], order_by=["start_time"])
    assert [run.data.tags["mlflow.athanor.identity"] for run in runs] == ["two", "one"]
    aliases = {alias: int(v) for alias, v in client.get_registered_model("athanor-test").aliases.items()}
    assert aliases == {"champion": 1, "candidate": 2}


def _open_and_die(root: Path) -> None:
    write_live(open_tracker(root, "killed"), [timed_row(1), timed_row(2)])
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def killed(tmp_path) -> None:
    """Leave the record of a run whose process was killed."""
    process = multiprocessing.get_context("fork").Process(target=_open_and_die, args=(tmp_path,))
    process.start()
    process.join()


@pytest.mark.usefixtures("killed")
def test_a_killed_run_gets_its_end(tmp_path):
    (one,) = publish_waiting(tmp_path)
    assert (one.sent, one.problem) == ({"recipe": 1, "step": 2, "end": 1}, "")
    record = load_record(tmp_path, "killed")
    run = connect(tmp_path).get_run(record.learnt.run_id)
    assert run.info.status == "KILLED" and run.data.metrics["loss"] == 0.5
    assert record.changed_ms >= run.info.end_time >= record.opened_ms, "the last sign of its life, not of its end"
    assert publish_waiting(tmp_path) == []


@pytest.mark.full
@pytest.mark.usefixtures("killed")
def test_a_killed_run_that_was_published_before_gets_its_end_too(tmp_path):
    Publication(tmp_path, "killed").run()
    assert [key for key, _ in waiting_records(tmp_path)] == ["killed"]
    (one,) = publish_waiting(tmp_path)
    assert one.sent == {"end": 1} and waiting_records(tmp_path) == []


def test_a_running_one_is_left_alone_and_not_ended(tmp_path):
    write_live(open_tracker(tmp_path, "alive"), [timed_row(1)])
    other = publish_lock(tmp_path, "alive")  # another process holds it
    other.acquire()
    (one,) = publish_waiting(tmp_path)
    assert one.is_sending and not one.sent and one.problem == ""
    other.release()
    (one,) = publish_waiting(tmp_path)
    assert one.sent == {"recipe": 1, "step": 1}
    run_id = load_record(tmp_path, "alive").learnt.run_id
    assert connect(tmp_path).get_run(run_id).info.status == "RUNNING"


def test_what_a_crash_left_in_part_is_passed_over(tmp_path, caplog):
    tracker = open_tracker(tmp_path, "cut")
    write_live(tracker, [timed_row(1)])
    write_sample(tmp_path, "cut", 10)
    for path in (tmp_path / "scratch" / "metrics.jsonl", samples_path(tmp_path, "cut")):
        with path.open("a") as file:
            file.write('{"step": 2, "time_ms": 1')
    (records_dir(tmp_path) / "spoilt.json").write_text("{")
    (one,) = publish_waiting(tmp_path)
    assert one.sent == {"recipe": 1, "step": 1, "machine sample": 1} and one.problem == ""
    assert "spoilt.json cannot be read" in caplog.text


def _change_many(root: str, who: int) -> None:
    for number in range(40):
        with changed(Path(root), "shared") as record:
            record.opening.tags[f"{who}-{number}"] = "here"


@pytest.mark.full
def test_two_processes_change_one_record(tmp_path):
    open_tracker(tmp_path, "shared")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_change_many, args=(str(tmp_path), who)) for who in (1, 2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    record = load_record(tmp_path, "shared")
    assert record.revision == 81 and list(record.opening.tags.values()).count("here") == 80


def test_no_address_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/canary-db.db")
    tell_a_run(tmp_path, "one")
    Publication(tmp_path, "one").run()
    kept = list((tmp_path / "tracking").rglob("*.json*"))
    assert kept and not any("canary-db" in path.read_text() for path in kept)
