"""A flow run of a service writes its output into the worker's log itself, without the worker, and ends with it."""

import os
import signal
import subprocess
import sys

from flows.pipeline.processes import ROOT_VARIABLE, SERVICE_VARIABLE
from flows.pipeline.run_record import read_runs
from tests.helpers.patience import at_most
from tests.helpers.service import wait_for


def environment(root, run_id: str) -> dict[str, str]:
    return {**os.environ, SERVICE_VARIABLE: str(root), ROOT_VARIABLE: str(root), "PREFECT__FLOW_RUN_ID": run_id}


def test_a_flow_run_prints_into_the_workers_log_and_needs_no_reader(tmp_path):
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "worker.log").write_text("before\n")
    reader, writer = os.pipe()
    os.close(reader)  # a killed worker leaves the pipe in this state
    ended = subprocess.run(
        [sys.executable, "-m", "flows.service.engine", str(os.getpid())],
        stdout=writer,
        stderr=writer,
        env=environment(tmp_path, "not-an-id"),
        timeout=at_most(120),
    )
    os.close(writer)
    log = (tmp_path / "service" / "worker.log").read_text()
    assert log.startswith("before\n")
    assert "Invalid flow run id" in log, "Prefect's engine has run, and said what was wrong"
    assert ended.returncode == 1 and read_runs(tmp_path) == []


# The engine, in which Prefect's engine only sleeps, and the start of a worker that runs it.
ENGINE = """
import runpy, time
run_module = runpy.run_module
runpy.run_module = lambda *_, **__: time.sleep(600)
run_module("flows.service.engine", run_name="__main__")
"""
WORKER = f"""
import os, subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", {ENGINE!r}, str(os.getpid())]).pid, flush=True)
time.sleep(600)
"""


def test_a_flow_run_is_recorded_before_it_runs_and_gets_sigterm_if_its_worker_is_killed(tmp_path):
    (tmp_path / "service").mkdir()
    command = [sys.executable, "-c", WORKER]
    run_id = "0d6c1d5e-6f1c-4e0c-9a2e-2f2d6a1b7c11"
    with subprocess.Popen(command, env=environment(tmp_path, run_id), stdout=subprocess.PIPE, text=True) as worker:
        pid = int(worker.stdout.readline())
        try:
            (record,) = wait_for(lambda: read_runs(tmp_path), 60, "record")
            assert (record.flow_run_id, record.pid, record.is_dead()) == (run_id, pid, False)
        finally:
            worker.send_signal(signal.SIGKILL)
    wait_for(record.is_dead, 20, "end of the flow run")
