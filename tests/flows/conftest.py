"""No server of the developer's, no real training: the trainer is a stand-in."""

import pytest


@pytest.fixture(autouse=True)
def quick_and_apart(monkeypatch):
    """For every test."""
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "FAKE_TRAINER"):
        monkeypatch.delenv(name, raising=False)
    from stages.launchers.job import LAUNCHERS

    monkeypatch.setitem(LAUNCHERS, "torchrun", "tests.helpers.fake_trainer:FakeTrainerLauncher")
