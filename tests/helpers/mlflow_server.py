"""MLflow's own server on loopback, over SQLite, which a test can stop and start again."""

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.helpers.object_store import free_port
from tests.helpers.patience import at_most, wait_for


class MlflowServer:
    """A server that keeps its address when its process is restarted.

    Args:
        serves_files: whether files are sent over HTTP; otherwise clients write them into the server's directory.
    """

    def __init__(self, directory: Path, serves_files: bool = False) -> None:
        self.directory, self.serves_files = directory, serves_files
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self, seconds: float = 180) -> None:
        options = ["--backend-store-uri", f"sqlite:///{self.directory}/server.db", "--port", str(self.port)]
        files = (self.directory / "artifacts").as_uri()
        if self.serves_files:
            options += ["--artifacts-destination", files]
        else:
            options += ["--default-artifact-root", files, "--no-serve-artifacts"]
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1", *options],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
            )
        wait_for(self._answers, seconds, "answer of the server")

    def _answers(self) -> bool:
        assert self.process.poll() is None, "the server does not come up"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
            return True
        return False

    def stop(self) -> None:
        """Kill the server and its workers at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(at_most(30))
            self.process = None
