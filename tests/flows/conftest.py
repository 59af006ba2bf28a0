"""Fixtures that keep tests from the developer's servers and replace the training by a stand-in."""

import pytest


@pytest.fixture(autouse=True)
def quick_and_apart(monkeypatch):
    """Apply to every test."""
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "FAKE_TRAINER"):
        monkeypatch.delenv(name, raising=False)
    from stages.launchers.job import LAUNCHERS

    monkeypatch.setitem(LAUNCHERS, "torchrun", "tests.helpers.fake_trainer:FakeTrainerLauncher")
