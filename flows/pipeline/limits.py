"""Named concurrency limits: how many jobs may use a GPU host, a partition or a namespace at once.

They are Prefect's global concurrency limits, on the server of PREFECT_API_URL. A temporary server of this process has
no other users, so no slot is needed there. A limit that the server does not know is made with one slot. A slot is held
under a lease of one minute, which is renewed. If its holder is killed, the slot is free after that minute. A run on the
same root and host gets it at once, because the record of the holder's run shows that its process is dead.

Prefect's own context manager is not used. After three failed renewals it gives the slot up for the rest of the block,
and then a second job could run at the same time (docs/decisions/service.md). Here the renewal is repeated until it
succeeds, a slot that was lost in the meantime is taken again, and no job ends because the server is away.
"""

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import MissingContextError, ObjectAlreadyExists, PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath
from flows.pipeline.run_record import read_runs, record_slot
from flows.pipeline.temporary_server import is_temporary
from stages.shared.launchers.config import ClusterConfig

HOST_LIMIT = ClusterConfig().limit
LEASE_SECONDS = 60.0  # the shortest that Prefect grants
RENEW_SECONDS = 15.0
JOIN_SECONDS = 15.0  # longest wait for a renewal in progress
TRY_SECONDS = 2.0  # between two tries to get a slot
LOG_SECONDS = 60.0  # between two lines about the same wait
SERVER_SECONDS = 600.0  # longest wait for the server to come back; after that the next call fails
_BUSY_PAUSES = (0.05, 0.1, 0.2, 0.4)
_NO_SLOTS, _LOCKED, _BUSY, _GONE = 422, 423, 503, (404, 410)
Answer = TypeVar("Answer")
log = logging.getLogger("athanor.limits")


def has_server() -> bool:
    """Whether Prefect's server may have other users. A temporary server of this process has none."""
    return PREFECT_API_URL.value() is not None and not is_temporary()


def wait_for_server(seconds: float = SERVER_SECONDS) -> None:
    """Wait for the server if it is away. Without the wait, the next call would fail the run after hours of work."""
    if not has_server():
        return
    deadline, is_away = time.monotonic() + seconds, False
    while time.monotonic() < deadline:
        with get_client(sync_client=True) as client:
            if (problem := client.api_healthcheck()) is None:
                return
        if not is_away:
            log.warning("Prefect's server is away (%s); finished work is kept; waiting for the server", problem)
        is_away = True
        time.sleep(TRY_SECONDS)


def create_limits(limits: Mapping[str, int]) -> None:
    """Create or change these limits on the server, and create the limit of this host, with one slot, if it is missing.
    May be called again at any time.

    Args:
        limits: name -> number of slots.

    Raises:
        InputError: a limit has less than one slot, so that no job could run.
    """
    for name, slots in limits.items():
        if slots < 1:
            raise InputError(f"--limit {name}={slots}: a limit of less than 1 slot lets nothing run; give 1 or more")
    with get_client(sync_client=True) as client:
        for name, slots in limits.items():
            client.upsert_global_concurrency_limit_by_name(name, slots)
        _create(client, HOST_LIMIT)


def _create(client: SyncPrefectClient, name: str) -> bool:
    """Create a limit with one slot; return False if it exists."""
    try:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))
        return True
    except ObjectAlreadyExists:
        return False


def free_dead_slots(client: SyncPrefectClient, root: StorePath) -> None:
    """Release the slots of runs of this root whose processes on this host are dead."""
    for record in read_runs(root):
        if record.lease_id is not None and record.is_dead():
            client.release_concurrency_slots_with_lease(UUID(record.lease_id))


@contextlib.contextmanager
def slot_of(name: str, root: StorePath) -> Iterator[None]:
    """Hold a slot of a limit while the block lasts. The wait for the slot is reported in the run's log.

    Args:
        root: the root that keeps the record of the run.

    Raises:
        InputError: somebody has set the limit to 0 slots.
    """
    if not has_server():
        yield
        return
    slot = _Slot(name, root)
    slot.wait()
    here = contextvars.copy_context()  # includes Prefect's settings, which name the slot's server
    thread = threading.Thread(target=here.run, args=(slot.renew,), name=f"slot-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        slot.is_released.set()
        thread.join(JOIN_SECONDS)  # otherwise the thread could take the slot again after its release
        slot.release()


class _Slot:
    """One slot of a limit. Its lease is another one after the slot was lost and taken again."""

    def __init__(self, name: str, root: StorePath) -> None:
        self.name, self.root = name, root
        self.lease_id: UUID | None = None
        self.is_released = threading.Event()
        try:
            self.logger = get_run_logger()
        except MissingContextError:
            self.logger = log

    def wait(self) -> None:
        """Wait for a slot without a time limit, and take it."""
        logged_at, start = 0.0, time.monotonic()
        while (why := self._try()) is not None:
            if not logged_at or time.monotonic() - logged_at >= LOG_SECONDS:
                logged_at = time.monotonic()
                self.logger.info("waiting for a slot of the concurrency limit '%s': %s", self.name, why)
            time.sleep(TRY_SECONDS)
        if logged_at:
            self.logger.info("got a slot of '%s' after %.0f s", self.name, time.monotonic() - start)

    def _try(self) -> str | None:
        """Try to take a slot. Return None if it was taken, else the reason."""
        try:
            with get_client(sync_client=True) as client:
                if self._take(client):
                    return None
                free_dead_slots(client, self.root)
                return None if self._take(client) else self._usage(client)
        except PrefectHTTPStatusError as error:
            if error.response.status_code == _NO_SLOTS:
                raise InputError(
                    f"the concurrency limit '{self.name}' has no slot; raise it in Prefect under Concurrency, or with "
                    f"`athanor up --limit {self.name}=1`"
                ) from error
            return f"Prefect's server refused ({error.response.status_code})"
        except httpx.HTTPError as error:
            return f"Prefect's server does not answer ({type(error).__name__})"

    def _take(self, client: SyncPrefectClient) -> bool:
        """Take a slot; return False if all are in use."""
        run = flow_run.id
        holder = ConcurrencyLeaseHolder(type="flow_run", id=run) if run else None
        options = ([self.name], 1, "concurrency", LEASE_SECONDS, holder)
        try:
            answer = _promptly(lambda: client.increment_concurrency_slots_with_lease(*options)).json()
        except PrefectHTTPStatusError as error:
            if error.response.status_code == _LOCKED:
                return False
            raise
        if not answer["limits"]:  # the server does not know the limit, and has granted a slot of nothing
            if _create(client, self.name):
                self.logger.info(
                    "the concurrency limit '%s' is made, with 1 slot; `athanor up --limit %s=N` gives it more",
                    *(self.name, self.name),
                )
            return self._take(client)
        self.lease_id = UUID(answer["lease_id"])
        record_slot(self.root, self.name, str(self.lease_id))
        return True

    def _usage(self, client: SyncPrefectClient) -> str:
        limit = client.read_global_concurrency_limit_by_name(self.name)
        runs = {record.flow_run_id for record in read_runs(self.root) if record.limit == self.name}
        names = [client.read_flow_run(UUID(run)).name for run in sorted(runs)]
        return f"{limit.active_slots} of {limit.limit} in use" + (f", by {', '.join(names)}" if names else "")

    def renew(self) -> None:
        """Renew the lease until the slot is released. No error of the renewal ends the job."""
        is_away = False
        while not self.is_released.wait(RENEW_SECONDS):
            try:
                with get_client(sync_client=True) as client:
                    if not self._renew_once(client):
                        raise RuntimeError("another job took it while the server was away")
                if is_away:
                    log.info("Prefect's server answers again; the slot of '%s' is held", self.name)
                is_away = False
            except Exception as error:
                if not is_away:
                    log.warning("the slot of '%s' could not be renewed, the job goes on: %s", self.name, error)
                is_away = True

    def _renew_once(self, client: SyncPrefectClient) -> bool:
        """Renew the lease, or take the slot again if it was lost; return False if it is another job's now."""
        try:
            client.renew_concurrency_lease(self.lease_id, LEASE_SECONDS)
            return True
        except PrefectHTTPStatusError as error:
            if error.response.status_code not in _GONE:
                raise
        return self.is_released.is_set() or self._take(client)

    def release(self) -> None:
        """Release the slot. If the server is away, the lease expires by itself."""
        try:
            with get_client(sync_client=True) as client:
                _promptly(lambda: client.release_concurrency_slots_with_lease(self.lease_id))
        except (httpx.HTTPError, PrefectHTTPStatusError) as error:
            self.logger.warning("the slot of '%s' ends by itself within a minute: %s", self.name, error)
        record_slot(self.root, None, None)


def _promptly(call: Callable[[], Answer]) -> Answer:
    """Call Prefect's server, and try again within a second if it is busy. Prefect's client would wait two seconds.

    The server's SQLite refuses a call (503) during another write, and the end of a stage makes many writes.
    """
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        for pause in _BUSY_PAUSES:
            try:
                return call()
            except PrefectHTTPStatusError as error:
                if error.response.status_code != _BUSY:
                    raise
            time.sleep(pause)
        return call()
