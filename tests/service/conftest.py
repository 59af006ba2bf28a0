"""One running `athanor up` for each module of tests that asks for it."""

from collections.abc import Iterator

import pytest

from tests.helpers.service import RunningService


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[RunningService]:
    """A service on a small throw-away root; it is stopped at the end, and must have left nothing."""
    running = RunningService(tmp_path_factory.mktemp("service") / "root")
    try:
        yield running
    finally:
        running.stop()
    assert not running.processes(), f"left behind: {running.processes()}\n{running.tell()}"
