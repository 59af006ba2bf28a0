"""A flow run of a service writes its output into the worker's log itself, without the worker."""

import os
import subprocess
import sys

from flows.prefect_server.processes import SERVICE_VARIABLE
from tests.helpers.patience import at_most


def test_a_flow_run_prints_into_the_workers_log_and_needs_no_reader(tmp_path):
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "worker.log").write_text("before\n")
    reader, writer = os.pipe()
    os.close(reader)  # a killed worker leaves the pipe in this state
    ended = subprocess.run(
        [sys.executable, "-m", "flows.service.engine", "not-an-id"],
        stdout=writer,
        stderr=writer,
        env={**os.environ, SERVICE_VARIABLE: str(tmp_path)},
        timeout=at_most(120),
    )
    os.close(writer)
    log = (tmp_path / "service" / "worker.log").read_text()
    assert log.startswith("before\n")
    assert "Invalid flow run id" in log, "Prefect's engine has run, and said what was wrong"
    assert ended.returncode == 1
