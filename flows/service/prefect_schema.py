"""Prefect's own SQLite file, made by one process at a time: two that migrate a fresh one at once ruin each other."""

import filelock
import prefect
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_HOME

from flows.service.prefect_home import SCHEMA_LOCK

_LOCK_SECONDS = 300.0  # a first start on a loaded laptop takes a minute


def start_prefect() -> None:
    """Have the tables of Prefect's database made before a flow runs without a service.

    The temporary server that this starts is the one that the flow of this process uses: nothing is done twice. Where
    the tables are there, or a server is set, nothing happens.
    """
    home = PREFECT_HOME.value()
    made = home / f"schema-{prefect.__version__}"  # a newer Prefect migrates again
    if PREFECT_API_URL.value() is not None or made.exists():
        return
    home.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(home / SCHEMA_LOCK, timeout=_LOCK_SECONDS):
        with get_client(sync_client=True) as client:
            client.read_flows(limit=1)
        made.touch()
