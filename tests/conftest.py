"""Settings for every test: one CPU thread, because tests start processes that share the cores; no network and no
telemetry; a temporary home for Prefect, which the first import of Prefect reads.

Files run in the order of their recorded durations, longest first, because on few cores the last file decides when all
tests are finished.
"""

import os
from collections.abc import Iterator

import pytest

from tests.helpers.patience import measure_start
from tests.helpers.process_dir import process_dir
from tests.helpers.template_server import FORKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DO_NOT_TRACK", "true")

os.environ["PREFECT_HOME"] = str(process_dir("prefect"))
measure_start()

pytest_plugins = ("tests.tiers.plugin",)


@pytest.fixture(autouse=True, scope="session")
def quick() -> Iterator[None]:
    """Fork the processes of chat templates, in a fiftieth of the time of a start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stages.shared.chat_format.template.subprocess", FORKING)
        yield
