"""run_tasks: every result once, errors as they are, and no worker outlives a killed parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.workers import StageResources, run_tasks

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_every_task_has_its_result(num_workers):
    tasks = [str(i) for i in range(7)]
    assert dict(run_tasks(int, tasks, num_workers)) == dict(enumerate(range(7)))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_comes_through_as_it_is(num_workers):
    with pytest.raises(ValueError, match="invalid literal"):
        dict(run_tasks(int, ["1", "x", "3"], num_workers))


def test_report_without_a_listener_is_fine():
    StageResources().report(1, 2)
    heard = []
    StageResources(on_progress=lambda done, total: heard.append((done, total))).report(1, 2)
    assert heard == [(1, 2)]


def test_workers_die_with_a_killed_parent(tmp_path):
    """Else they would write into the shards of the next try."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys, time\n"
        "from stages.workers import run_tasks\n"
        "def work(path):\n"
        "    open(path, 'w').write(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        "    list(run_tasks(work, sys.argv[1:], 2))\n"
    )
    files = [tmp_path / "a", tmp_path / "b"]
    parent = subprocess.Popen([sys.executable, script, *files], env={**os.environ, "PYTHONPATH": str(REPO)})
    try:
        wait_until(lambda: all(f.is_file() and f.read_text() for f in files))
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    workers = [int(f.read_text()) for f in files]
    wait_until(lambda: not any(is_running(pid) for pid in workers))


def wait_until(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
