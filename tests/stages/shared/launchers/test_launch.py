"""The launcher: real processes, with and without torchrun's real command line; no trainer."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import Handle, Job, JobFailed, make_launcher, run_job
from stages.shared.launchers.processes import processes_of, runs
from stages.shared.launchers.torchrun import TorchrunLauncher
from tests.helpers.patience import at_most, wait_for
from tests.helpers.tiers import tiered


def _job(tmp_path: Path, code: str, **kwargs) -> Job:
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(code))
    return Job(name=str(tmp_path), arguments=(str(script),), log_path=tmp_path / "logs" / "job.log", **kwargs)


def _plain(**kwargs) -> TorchrunLauncher:
    """Return a launcher of one process, which needs no torchrun."""
    return TorchrunLauncher(ClusterConfig(**{"stop_grace_seconds": 5, **kwargs}))


SLOW_WITH_CHILD = """
    import signal, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    {handler}
    print("ready", flush=True)
    time.sleep(60)
"""


def _saving(tmp_path: Path) -> tuple[Job, threading.Event]:
    """Return a job that takes a second to save, and the event of its first line."""
    handler = """
    def save(*_):
        open({begun!r}, "w").write("begun")
        time.sleep(1)
        open({path!r}, "w").write("saved")
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    """.format(begun=str(tmp_path / "begun"), path=str(tmp_path / "saved"))
    ready = threading.Event()
    return _job(tmp_path, SLOW_WITH_CHILD.format(handler=handler.strip()), on_line=lambda _: ready.set()), ready


def _alive(name: str) -> list[psutil.Process]:
    return [p for p in processes_of(name) if runs(p)]


def _wait_ready(launcher: TorchrunLauncher, handle: Handle) -> None:
    while "ready" not in handle.lines:
        assert launcher.poll(handle) is None
        time.sleep(0.05)


def test_lines_reach_the_callback_and_the_log(tmp_path):
    seen = []
    run_job(_plain(), _job(tmp_path, "print('one'); print('two')", on_line=seen.append))
    assert seen == ["one", "two"]
    assert (tmp_path / "logs" / "job.log").read_text() == "one\ntwo\n"


def test_a_long_log_is_cut_while_the_job_writes_and_each_line_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr("dataset_builders.storage.files.MAX_LOG_BYTES", 1000)
    seen = []
    code = "import time\nfor i in range(20):\n    print(f'{i:0200d}', flush=True)\n    time.sleep(0.1)"
    job = _job(tmp_path, code, on_line=seen.append)
    run_job(_plain(), job)
    assert [int(line) for line in seen] == [*range(20)]
    halves = [job.log_path.read_text(), job.log_path.with_name("job.log.1").read_text()]
    assert max(map(len, halves)) < 2000 and "\0" not in "".join(halves)
    run_job(_plain(), _job(tmp_path, "print('again')"))
    assert [path.name for path in job.log_path.parent.iterdir()] == ["job.log"]


def test_failure_tells_command_status_log_and_last_lines(tmp_path):
    job = _job(tmp_path, "import sys\nfor i in range(100): print('line', i)\nsys.exit(3)")
    with pytest.raises(JobFailed) as caught:
        run_job(_plain(), job)
    text = str(caught.value)
    assert caught.value.exit_status == 3 and "exit status 3" in text
    assert "job.py" in text and str(job.log_path) in text
    assert "line 99" in text and "line 60" in text and "line 59" not in text


def test_the_job_sees_the_environment_that_the_launcher_writes(tmp_path):
    names = ["DO_NOT_TRACK", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"]
    seen = []
    code = f"import os; print([os.environ.get(n) for n in {names}])"
    run_job(_plain(num_threads=3), _job(tmp_path, code, on_line=seen.append))
    assert seen == [f"['true', '1', '{os.environ.get('OMP_NUM_THREADS', '3')}']"]


def test_a_poll_after_the_deadline_has_ended_the_job_and_its_children(tmp_path):
    launcher = _plain(timeout_seconds=1)
    handle = launcher.submit(_job(tmp_path, SLOW_WITH_CHILD.format(handler="")))
    with pytest.raises(JobFailed, match="timeout_seconds=1"):
        while launcher.poll(handle) is None:
            time.sleep(0.05)
    assert not _alive(handle.job.name)


@pytest.fixture
def interrupts_reach_python():
    """A shell starts background commands with SIGINT ignored, and Python keeps it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_reach_python")
def test_an_interrupt_gives_time_to_save_and_leaves_nothing(tmp_path):
    job, ready = _saving(tmp_path)
    threading.Thread(target=lambda: (ready.wait(at_most(60)), os.kill(os.getpid(), signal.SIGINT))).start()
    with pytest.raises(KeyboardInterrupt):
        run_job(_plain(stop_grace_seconds=30), job)
    assert (tmp_path / "saved").read_text() == "saved"
    assert not _alive(job.name)


class Stopped(BaseException):
    """Stands for the exception that Prefect's handler of SIGTERM raises."""


@pytest.fixture
def sigterm_stops():
    """Set a handler of SIGTERM, as in the process of a flow run."""

    def stop(*_):
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    yield stop
    signal.signal(signal.SIGTERM, before)


def test_a_second_sigterm_does_not_cost_the_checkpoint(tmp_path, sigterm_stops):
    job, ready = _saving(tmp_path)

    def stop_twice():
        ready.wait(at_most(60))
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for((tmp_path / "begun").exists, 20, "beginning of the save")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_twice).start()
    with pytest.raises(Stopped):
        run_job(_plain(stop_grace_seconds=30), job)
    assert (tmp_path / "saved").read_text() == "saved"
    assert not _alive(job.name)
    assert signal.getsignal(signal.SIGTERM) is sigterm_stops


def test_who_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    job = _job(tmp_path, SLOW_WITH_CHILD.format(handler="signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    launcher = _plain(stop_grace_seconds=1)
    handle = launcher.submit(job)
    _wait_ready(launcher, handle)
    started = time.monotonic()
    launcher.cancel(handle)
    assert 1 <= time.monotonic() - started < 10
    assert not _alive(job.name)


def test_a_job_cancelled_in_its_first_instant_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("stages.shared.launchers.torchrun.processes_of", lambda name: [])  # as during an exec
    launcher = _plain(stop_grace_seconds=1)
    handle = launcher.submit(_job(tmp_path, "import time\ntime.sleep(60)"))
    launcher.cancel(handle)
    assert handle.process.poll() is not None


def test_a_new_try_ends_what_a_killed_parent_left(tmp_path):
    launcher = _plain(stop_grace_seconds=1)
    left = launcher.submit(_job(tmp_path, SLOW_WITH_CHILD.format(handler="")))
    _wait_ready(launcher, left)
    assert _alive(str(tmp_path))
    run_job(launcher, _job(tmp_path, "print('second')"))
    assert left.process.wait(at_most(30)) != 0
    assert not _alive(str(tmp_path))


# A parent that runs a job, and the job, which saves at SIGTERM.
PARENT = """
import sys
from pathlib import Path
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import Job, make_launcher, run_job
place = Path(sys.argv[1])
job = Job(name=str(place), arguments=(str(place / "job.py"), str(place)), log_path=place / "logs" / "job.log")
run_job(make_launcher(ClusterConfig(processes=int(sys.argv[2]), stop_grace_seconds=5)), job)
"""
SAVES = """
import os, signal, sys, time
path = f"{sys.argv[1]}/{os.environ['RANK']}"
def save(*_):
    time.sleep(0.5)
    os.rename(path, path + "-saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open(path, "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize("processes", tiered([1, 2], core=[1]))
def test_a_job_whose_parent_is_killed_saves_and_ends(tmp_path, processes):
    (tmp_path / "job.py").write_text(SAVES)
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(processes)]
    with subprocess.Popen(command) as parent:
        wait_for(lambda: len(list(tmp_path.glob("[01]"))) == processes, 60, "start of the ranks")
        parent.kill()
    wait_for(lambda: len(list(tmp_path.glob("[01]-saved"))) == processes, 20, "what the ranks save")
    wait_for(lambda: not _alive(str(tmp_path)), 20, "end of the job")


@pytest.mark.parametrize("processes", tiered([1, 2], core=[1]))
def test_ranks_know_their_place_and_the_error_has_the_status_of_the_first_to_fail(tmp_path, monkeypatch, processes):
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "elsewhere"}.items():  # set by an outer job
        monkeypatch.setenv(name, value)
    code = """
    import os, sys, time
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ.get("MASTER_ADDR"), flush=True)
    time.sleep(60 * (os.environ["RANK"] != "0"))  # or torchrun ends rank 0, perhaps before it has printed
    sys.exit(7)
    """
    launcher = make_launcher(ClusterConfig(processes=processes))
    job = _job(tmp_path, code)
    assert [option in launcher.plan(job) for option in ("--max-restarts=0", "--standalone")] == [processes > 1] * 2
    with pytest.raises(JobFailed) as caught:
        run_job(launcher, job)
    assert caught.value.exit_status == 7
    address = None if processes == 1 else "127.0.0.1"
    assert f"rank 0 of {processes} {address}" in job.log_path.read_text().replace("localhost", "127.0.0.1")


def test_every_rank_has_its_log_and_the_error_shows_that_of_the_first_to_fail(tmp_path):
    code = """
    import os, sys, time
    rank = os.environ["RANK"]
    print("words of rank", rank, flush=True)
    if rank == "1":
        print("rank 1 cannot go on", file=sys.stderr)
        sys.exit(9)
    time.sleep(60)
    """
    seen = []
    job = _job(tmp_path, code, on_line=seen.append)
    left_over = job.log_path.with_name("rank-0007.log")
    left_over.parent.mkdir()
    left_over.touch()
    with pytest.raises(JobFailed) as caught:
        run_job(make_launcher(ClusterConfig(processes=2, stop_grace_seconds=2)), job)
    of_rank_1 = tmp_path / "logs" / "rank-0001.log"
    assert of_rank_1.read_text() == "words of rank 1\nrank 1 cannot go on\n"
    assert "words of rank 0" in seen and "words of rank 1" not in job.log_path.read_text()
    assert caught.value.exit_status == 9 and caught.value.log_path == of_rank_1
    text = str(caught.value)
    assert "exit status 9" in text and f"rank 1 failed first; its log: {of_rank_1}" in text
    assert text.endswith("words of rank 1\nrank 1 cannot go on")
    assert not left_over.exists() and not _alive(job.name)


@pytest.fixture(autouse=True)
def short_leftover_time(monkeypatch):
    monkeypatch.setattr("stages.shared.launchers.torchrun.LEFTOVER_SECONDS", 0.5)
