"""run_tasks: each result once, wherever it runs; errors unchanged; no worker outlives a killed parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from dataset_builders.errors import InputError
from stages.shared.artifacts import workers
from stages.shared.artifacts.workers import StageResources, run_tasks
from stages.shared.launchers.processes import runs
from tests.helpers.patience import wait_for

REPO = Path(__file__).parents[4]


@pytest.fixture(params=["here", "processes", "executor"])
def resources(request):
    if request.param == "executor":
        with ThreadPoolExecutor(2) as executor:
            yield StageResources(executor=executor)
    else:
        yield StageResources(num_workers=2 if request.param == "processes" else 1)


def test_every_task_has_its_result(resources):
    tasks = [str(i) for i in range(17)]
    assert dict(run_tasks(int, tasks, resources)) == dict(enumerate(range(17)))
    assert dict(run_tasks(int, tasks[:1], resources)) == {0: 0}
    assert dict(run_tasks(int, [], resources)) == {}


def test_an_error_comes_through_as_it_is(resources):
    with pytest.raises(ValueError, match="invalid literal"):
        dict(run_tasks(int, ["1", "x", "3"], resources))


class HeldExecutor(Executor):
    """An executor that keeps its tasks until it is told to run them."""

    def __init__(self) -> None:
        self.held: list[tuple[Future, object, tuple]] = []
        self.most_held = 0

    def submit(self, function, /, *args, **kwargs):
        future: Future = Future()
        self.held.append((future, function, args))
        self.most_held = max(self.most_held, len(self.held))
        return future

    def run_one(self, at: int) -> None:
        wait_for(lambda: len(self.held) > at, 30, "task")
        future, function, args = self.held.pop(at)
        future.set_running_or_notify_cancel()
        future.set_result(function(*args))


def test_results_come_in_the_order_in_which_tasks_end():
    executor = HeldExecutor()
    results = run_tasks(int, "0123", StageResources(executor=executor))
    order = []
    threading.Timer(0.05, lambda: executor.run_one(2)).start()
    order.append(next(results))
    for at in (2, 0, 0):
        executor.run_one(at)
        order.append(next(results))
    assert order == [(2, 2), (3, 3), (0, 0), (1, 1)] and next(results, None) is None


def test_an_executor_is_used_for_a_single_task_too():
    executor = HeldExecutor()
    threading.Timer(0.05, lambda: executor.run_one(0)).start()
    assert list(run_tasks(int, ["7"], StageResources(executor=executor).at_most(1))) == [(0, 7)]
    assert StageResources(num_workers=8).at_most(2).num_workers == 2


def test_many_tasks_are_never_many_futures(monkeypatch):
    monkeypatch.setattr(workers, "_AHEAD_AT_LEAST", 6)
    taken, executor = [], HeldExecutor()
    tasks = (taken.append(i) or i for i in range(100_000))
    results = run_tasks(abs, tasks, StageResources(executor=executor))
    threading.Timer(0.05, lambda: executor.run_one(0)).start()
    assert next(results) == (0, 0) and len(taken) == 7
    for i in range(1, 500):
        executor.run_one(0)
        assert next(results) == (i, i)
    assert executor.most_held == 6 and len(taken) == 506
    results.close()
    assert all(future.cancelled() for future, *_ in executor.held)


def test_a_failure_cancels_the_rest_and_waits_for_what_runs():
    """Otherwise a worker would keep writing in a directory that the next try already uses."""
    began, ended = [], []

    def work(number: int) -> None:
        if number == 0:
            while len(began) < 1:
                time.sleep(0.01)
            raise OSError("no disk")
        began.append(number)
        time.sleep(0.3)
        ended.append(number)

    with ThreadPoolExecutor(2) as executor:
        with pytest.raises(OSError, match="no disk"):
            list(run_tasks(work, range(40), StageResources(executor=executor)))
        assert sorted(began) == sorted(ended) and len(began) < 5
        time.sleep(0.1)
        assert sorted(began) == sorted(ended)


def test_a_killed_worker_is_one_clear_error():
    resources = StageResources(num_workers=2)
    words = r"one of 2 worker processes died in raise_signal: .*execution\.num_workers"
    with pytest.raises(InputError, match=words) as caught:
        list(run_tasks(signal.raise_signal, [signal.SIGKILL] * 3, resources))
    assert "\n" not in str(caught.value)


def test_workers_die_with_a_killed_parent(tmp_path):
    """Otherwise they would write into the shards of the next try."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, time\n"
        "from stages.shared.artifacts.workers import StageResources, run_tasks\n"
        "def work(path):\n"
        "    open(path, 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    list(run_tasks(work, sys.argv[1:], StageResources(num_workers=2)))\n"
    )
    files = [tmp_path / "a", tmp_path / "b"]
    parent = subprocess.Popen([sys.executable, script, *files], env={**os.environ, "PYTHONPATH": str(REPO)})
    try:
        wait_for(lambda: all(f.is_file() and f.read_text() for f in files), 30, "start of the workers")
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    started = [int(f.read_text()) for f in files]
    wait_for(lambda: not any(p.pid in started and runs(p) for p in psutil.process_iter()), 30, "end of the workers")
