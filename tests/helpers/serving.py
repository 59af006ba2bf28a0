"""A running `athanor serve` for tests and benches: a process of its own."""

import base64
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from flows.prefect_server.ports import any_port
from tests.helpers.patience import at_most

START_SECONDS = 240.0


@dataclass(frozen=True)
class Serving:
    """A server that answers.

    Attributes:
        url: without a slash at its end.
        key: the password, which is the API key.
        output: file with everything that it has printed.
    """

    process: subprocess.Popen
    url: str
    key: str
    output: Path

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def stop(self) -> int:
        """Send Ctrl-C, and return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(at_most(30))


@contextmanager
def serving(models: Sequence[Path], root: Path, *options: str) -> Iterator[Serving]:
    """Start a server of these models, and stop it at the end."""
    port, output = any_port("127.0.0.1"), root.with_name(f"{root.name}-serve.txt")
    command = [sys.executable, "-m", "flows.cli.main", "serve", *map(str, models), "--root", str(root)]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port), *options],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != "ATHANOR_SERVE_KEY"},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + at_most(START_SECONDS)
        while "Ctrl-C" not in output.read_text():
            assert process.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        key = (root / "service" / "serve-password").read_text().strip().partition(":")[2]
        yield Serving(process, f"http://127.0.0.1:{port}", key, output)
    finally:
        process.kill()
        process.wait()


def chat(model: str, question: str, images: Sequence[bytes] = (), **fields: object) -> dict:
    """Return the body of a request with PNG images before the question."""
    urls = ["data:image/png;base64," + base64.b64encode(image).decode() for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": question}]
    return {"model": model, "messages": [{"role": "user", "content": content}], **fields}


def ask(server: Serving, body: dict) -> dict:
    """Return the answer's whole completion."""
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=server.headers, timeout=at_most(600))
    assert answer.status_code == 200, answer.text
    return answer.json()
