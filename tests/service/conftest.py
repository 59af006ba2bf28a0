"""One running `athanor up` for the modules of tests that need no fresh one."""

from collections.abc import Iterator

import pytest

from tests.helpers.service import RunningService, running_service


@pytest.fixture(scope="session")
def service(tmp_path_factory) -> Iterator[RunningService]:
    """A service on a small throw-away root, on which test_life has disturbed runs before test_ui looks at new ones."""
    with running_service(tmp_path_factory.mktemp("service") / "root") as running:
        yield running
