"""`athanor` as a user types it, in a process of its own or in this one, and the artifacts that it leaves."""

import contextlib
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from stages.shared.artifacts.artifact import Artifact
from tests.helpers.patience import at_most
from tests.helpers.service import clean_environment

ATHANOR = Path(sys.executable).parent / "athanor"


def athanor(*arguments: str, seconds: float = 1800, **environment: str) -> str:
    """Run a command that succeeds, and return its output."""
    env = {**clean_environment(), **environment}
    done = subprocess.run([ATHANOR, *arguments], capture_output=True, text=True, env=env, timeout=at_most(seconds))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sets(settings: Mapping[str, object]) -> list[str]:
    """Return the words of a command that change these settings."""
    return [f"--set={key}={value}" for key, value in settings.items()]


def made(root: Path, stage: str) -> list[Artifact]:
    """Return all artifacts of a stage."""
    return [Artifact.load(path) for path in sorted((root / "artifacts" / stage).iterdir()) if path.is_dir()]


def only(root: Path, stage: str) -> Artifact:
    """Return the one artifact of a stage."""
    (artifact,) = made(root, stage)
    return artifact


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Undo the changes that `main` makes in this process."""
    handlers, on_sigterm = list(logging.getLogger().handlers), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            patch.delenv(name, raising=False)
        yield
    signal.signal(signal.SIGTERM, on_sigterm)
    logging.getLogger().handlers[:] = handlers
