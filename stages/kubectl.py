"""Calls of kubectl: what is there, make, delete, and the lines of a pod's log, each once."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from dataset_builders.contracts.errors import InputError
from stages.cluster_config import KubernetesConfig

REQUEST_SECONDS = 20
_MOST_READINGS = 10  # of the log of a container that has ended
_INSTALL = "https://kubernetes.io/docs/tasks/tools/"
_AWAY = re.compile(
    r"connect|refused|timeout|timed out|TLS handshake|EOF|reset by peer|no such host|no route|"
    r"ServiceUnavailable|InternalError|TooManyRequests|etcdserver|leader",
    re.IGNORECASE,
)


class KubectlError(RuntimeError):
    """kubectl said no; the text is its last line.

    Attributes:
        is_passing: the cluster did not answer, or could not: another try may help.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.is_passing = bool(_AWAY.search(text))


class NotThere(KubectlError):
    """The cluster has no object of that name."""


class Kubectl:
    """kubectl with one context and namespace."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._options = [f"--namespace={config.namespace}"]
        if config.context:
            self._options.append(f"--context={config.context}")

    def check_installed(self, manifest: Path | None = None) -> None:
        """See that there is a kubectl.

        Raises:
            InputError: there is none; the text says where it can be had and where the manifest is, if there is one.
        """
        if shutil.which("kubectl") is None:
            by_hand = f", or apply the manifest by hand where it is: {manifest}" if manifest else ""
            raise InputError(
                f"kubectl is not on PATH, and launcher=kubernetes submits with it; install it ({_INSTALL}){by_hand}"
            )

    def apply(self, manifest: Path) -> None:
        """Make what a file describes."""
        self._call("apply", "-f", str(manifest))

    def trainjob(self, name: str) -> dict[str, Any] | None:
        """The TrainJob as the cluster has it; None where there is none."""
        try:
            return json.loads(self._call("get", "trainjobs.trainer.kubeflow.org", name, "-o", "json"))
        except NotThere:
            return None

    def pods(self, name: str) -> list[dict[str, Any]]:
        """The pods of a TrainJob, which has its JobSet's name."""
        return json.loads(self._call("get", "pods", "-l", _pods_of(name), "-o", "json"))["items"]

    def delete_trainjob(self, name: str) -> None:
        """Ask for its end: SIGTERM to the pods, their grace, SIGKILL. It is there until its pods are gone."""
        self._call(
            "delete",
            "trainjobs.trainer.kubeflow.org",
            name,
            "--cascade=foreground",
            "--ignore-not-found",
            "--wait=false",
        )

    def kill_pods(self, name: str) -> None:
        """Remove the pods without waiting for them."""
        self._call("delete", "pods", "-l", _pods_of(name), "--ignore-not-found", "--grace-period=0", "--force")

    def follow(self, pod: str, container: str, since: str | None) -> subprocess.Popen[bytes]:
        """The log of a container on a pipe, each line after its time, until the container ends."""
        command = [*self._command("logs"), pod, f"--container={container}", "--timestamps", "--follow"]
        if since:
            command.append(f"--since-time={since}")
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
        )

    def last_lines(self, pod: str, container: str, count: int) -> list[str]:
        """The end of a container's log."""
        return self._call("logs", pod, f"--container={container}", f"--tail={count}").splitlines()

    def _command(self, verb: str) -> list[str]:
        return ["kubectl", verb, *self._options]

    def _call(self, verb: str, *arguments: str) -> str:
        command = [*self._command(verb), f"--request-timeout={REQUEST_SECONDS}s", *arguments]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=3 * REQUEST_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise KubectlError(f"kubectl {verb}: timed out after {error.timeout:g} s") from error
        if done.returncode == 0:
            return done.stdout
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise (NotThere if "(NotFound)" in lines[-1] else KubectlError)(f"kubectl {verb}: {lines[-1]}")


def _pods_of(name: str) -> str:
    return f"jobset.sigs.k8s.io/jobset-name={name}"


class LogStream:
    """The lines of one container, each once, however often the connection breaks.

    A broken stream begins again at the second of the last line; lines up to that one are passed over by their times.
    """

    def __init__(self, kubectl: Kubectl, pod: str, container: str, wait_seconds: float) -> None:
        self._kubectl, self._pod, self._container = kubectl, pod, container
        self._wait_seconds, self._begin_at = wait_seconds, 0.0  # between two beginnings; time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._part = b""
        self._last, self._count = "", 0  # the time of the last line, and how many lines have had it
        self._to_pass: int | None = None  # lines of that time still to pass over; None: what comes is new

    def lines(self) -> list[str]:
        """What has come since the last call; begins the stream where it has not begun, or has ended."""
        if self._process is None:
            if time.monotonic() < self._begin_at:
                return []
            self._begin()
        found = self._read()
        if self._process is not None and self._process.poll() is not None:
            found += self._read()
            self.close()
        return found

    def drain(self, seconds: float) -> list[str]:
        """The lines up to the end of the stream as it is, of a pod that may be gone."""
        deadline = time.monotonic() + seconds
        found: list[str] = []
        while self._process is not None and time.monotonic() < deadline:
            found += self.lines()
            time.sleep(0.02)
        self.close()
        return found

    def rest(self, seconds: float) -> list[str]:
        """The lines up to the end of a container that has ended.

        A stream that broke looks like one that ended, so it is read again until two readings, neither of which ended
        within a line, bring nothing new.
        """
        found = self.drain(seconds)
        idle = 0
        for _ in range(_MOST_READINGS):
            self._begin_at = 0.0
            new = self.lines() + self.drain(seconds)
            found += new
            idle = 0 if new or self._part else idle + 1
            if idle == 2:
                break
        return found

    def close(self) -> None:
        """End the stream; `lines` begins it again."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            process.stdout.close()

    def _begin(self) -> None:
        self._begin_at = time.monotonic() + self._wait_seconds
        self._part, self._to_pass = b"", self._count if self._last else None
        self._process = self._kubectl.follow(self._pod, self._container, self._last or None)
        os.set_blocking(self._process.stdout.fileno(), False)

    def _read(self) -> list[str]:
        found = []
        while self._process is not None and (data := self._process.stdout.read(1 << 16)):
            *whole, self._part = (self._part + data).split(b"\n")
            found += [text for line in whole if (text := self._new(line.decode(errors="replace"))) is not None]
        return found

    def _new(self, line: str) -> str | None:
        stamp, _, text = line.partition(" ")
        if self._to_pass is not None:
            if _ordered(stamp) < _ordered(self._last):
                return None
            if stamp == self._last and self._to_pass:
                self._to_pass -= 1
                return None
            self._to_pass = None
        self._count = self._count + 1 if stamp == self._last else 1
        self._last = stamp
        return text


def _ordered(stamp: str) -> str:
    """A time of a log, so that texts compare as times do: nine digits of a second, however many were written."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"
