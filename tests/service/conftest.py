"""One running `athanor up` for the test modules that do not need a new service."""

from collections.abc import Iterator

import pytest

from tests.helpers.service import RunningService, running_service


@pytest.fixture(scope="session")
def service(tmp_path_factory) -> Iterator[RunningService]:
    """Run a service on a small temporary root. test_life disturbs runs on it before test_ui looks at new ones."""
    with running_service(tmp_path_factory.mktemp("service") / "root") as running:
        yield running
