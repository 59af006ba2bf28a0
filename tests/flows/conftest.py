"""Fixtures that keep tests from the developer's servers and replace the training by a stand-in."""

import logging

import pytest

from tests.helpers.small_run import SmallRun, made_once, stand_in_trainer


@pytest.fixture(autouse=True)
def quick_and_apart():
    """Apply to every test."""
    handlers = list(logging.getLogger().handlers)
    with stand_in_trainer():
        yield
    logging.getLogger().handlers[:] = handlers  # a command adds its own


@pytest.fixture(scope="session")
def small_run(tmp_path_factory) -> SmallRun:
    """One finished run for all tests of all processes of the session."""
    own = tmp_path_factory.getbasetemp()
    directory = (own.parent if own.name.startswith("popen-") else own) / "small-run"
    directory.mkdir(exist_ok=True)
    return made_once(directory)
