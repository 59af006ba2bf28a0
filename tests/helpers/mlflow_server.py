"""MLflow's own server on loopback, over SQLite, which a test can stop and start again."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.helpers.patience import at_most


class MlflowServer:
    """A server that keeps its address when its process is restarted.

    Args:
        serves_files: whether files are sent over HTTP; otherwise clients write them into the server's directory.
    """

    def __init__(self, directory: Path, serves_files: bool = False) -> None:
        self.directory, self.serves_files = directory, serves_files
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self, seconds: float = 180) -> None:
        """Start the server and wait until it answers."""
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
        deadline = time.monotonic() + at_most(seconds)
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
            assert time.monotonic() < deadline and self.process.poll() is None, "the server does not come up"
            time.sleep(0.2)

    def stop(self) -> None:
        """Kill the server and its workers at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(at_most(30))
            self.process = None
