"""Prefect reads its home once, at import: a throwaway one for these tests. The trainer is a stand-in."""

import atexit
import os
import shutil
import tempfile

import pytest

_HOME = tempfile.mkdtemp(prefix="athanor-prefect-")
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
os.environ["PREFECT_HOME"] = _HOME


@pytest.fixture(autouse=True)
def quick_and_apart(monkeypatch):
    """No server of the developer's, no real training."""
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "FAKE_TRAINER"):
        monkeypatch.delenv(name, raising=False)
    from stages.launch import LAUNCHERS

    monkeypatch.setitem(LAUNCHERS, "torchrun", "tests.helpers.fake_trainer:FakeTrainerLauncher")
