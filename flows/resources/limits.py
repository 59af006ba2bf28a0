"""Named concurrency limits: how many jobs may use a GPU host, a partition or a namespace at once.

They are Prefect's global concurrency limits, on the server of PREFECT_API_URL. A temporary server of this process has
no other users, so no slot is needed there. A limit that the server does not know is made with one slot. A slot is held
under a lease of one minute, which is renewed. If its holder is killed, the slot is free after that minute. A job on the
same root and host gets it at once, because it sees that the holder is dead.

Prefect's own context manager is not used. It gives up after three failed renewals in a row, which is the few seconds of
a server's restart, and then a second job could run at the same time. Here the renewal is repeated until it succeeds, a
slot that was lost in the meantime is taken again, and no job ends because the server is away.
"""

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.exceptions import MissingContextError, ObjectAlreadyExists, ObjectNotFound, PrefectHTTPStatusError
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath
from flows.prefect_server.temporary import is_temporary
from flows.resources.run_record import LeaseRecord, forget_lease, read_leases, record_lease, this_process
from stages.launchers.config import ClusterConfig

HOST_LIMIT = ClusterConfig().limit
DEFAULT_LIMITS = {HOST_LIMIT: 1}
LEASE_SECONDS = 60.0  # the shortest that Prefect grants
RENEW_SECONDS = 15.0
JOIN_SECONDS = 15.0  # longest wait for a renewal in progress
TRY_SECONDS = 2.0  # between two tries to get a slot
LOG_SECONDS = 60.0  # between two lines about the same wait
SERVER_SECONDS = 600.0  # longest wait for the server to come back; after that the next call fails
_LOCKED, _BUSY, _GONE = 423, 503, (404, 410)
_BUSY_PAUSES = (0.05, 0.1, 0.2, 0.4)
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
    """Create or change these limits on the server. May be called again at any time.

    The limit of this host is created with one slot if it is missing. It is changed only if `limits` has it.

    Args:
        limits: name -> number of slots.

    Raises:
        InputError: a limit has less than one slot, so that no job could run.
    """
    for name, slots in limits.items():
        if slots < 1:
            raise InputError(f"--limit {name}={slots}: a limit of less than 1 slot lets nothing run; give 1 or more")
    with get_client(sync_client=True) as client:
        for name, slots in {**DEFAULT_LIMITS, **limits}.items():
            if not _create(client, name, slots) and name in limits:
                client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(limit=slots))


def free_dead_slots(client: SyncPrefectClient, root: StorePath) -> int:
    """Release the slots whose holders on this host are dead, and return their number."""
    dead = [lease for lease in read_leases(root) if lease.is_dead()]
    for lease in dead:
        client.release_concurrency_slots_with_lease(UUID(lease.lease_id))
        forget_lease(root, lease.lease_id)
    return len(dead)


@contextlib.contextmanager
def slot_of(name: str, root: StorePath) -> Iterator[None]:
    """Hold a slot of a limit while the block lasts. The wait for the slot is reported in the run's log.

    Args:
        root: the root that keeps the record of the slot's holder.

    Raises:
        InputError: somebody has set the limit to 0 slots.
    """
    if not has_server():
        yield
        return
    slot = Slot(name, root)
    slot.acquire()
    try:
        yield
    finally:
        slot.release()


class Slot:
    """One slot of a limit, and the thread that renews its lease."""

    def __init__(self, name: str, root: StorePath) -> None:
        self.name, self.root = name, root
        self.flow_run_id = flow_run.id
        self.lease_id: UUID | None = None
        self.logger = _logger()
        self._stop = threading.Event()
        here = contextvars.copy_context()  # includes Prefect's settings, which name the slot's server
        renew = partial(here.run, self._renew_until_released)
        self._thread = threading.Thread(target=renew, name=f"slot-{name}", daemon=True)

    def acquire(self) -> None:
        """Wait for a slot without a time limit, and take it."""
        logged_at, start = 0.0, time.monotonic()
        while (why := self._try()) is not None:
            if not logged_at or time.monotonic() - logged_at >= LOG_SECONDS:
                logged_at = time.monotonic()
                self.logger.info("waiting for a slot of the concurrency limit '%s': %s", self.name, why)
            time.sleep(TRY_SECONDS)
        if logged_at:
            self.logger.info("got a slot of '%s' after %.0f s", self.name, time.monotonic() - start)
        self._thread.start()

    def release(self) -> None:
        """Release the slot. If the server is away, the lease expires by itself."""
        self._stop.set()
        self._thread.join(JOIN_SECONDS)  # otherwise the thread could take the slot again after its release
        if self.lease_id is None:
            return
        try:
            with get_client(sync_client=True) as client:
                _promptly(lambda: client.release_concurrency_slots_with_lease(self.lease_id))
        except (httpx.HTTPError, PrefectHTTPStatusError) as error:
            self.logger.warning("the slot of '%s' ends by itself within a minute: %s", self.name, error)
        forget_lease(self.root, str(self.lease_id))

    def _try(self) -> str | None:
        """Try to take a slot. Return None if it was taken, else the reason."""
        try:
            with get_client(sync_client=True) as client:
                while True:
                    try:
                        _promptly(lambda: self._take(client))
                        return None
                    except PrefectHTTPStatusError as error:
                        if error.response.status_code != _LOCKED:
                            raise
                    if not free_dead_slots(client, self.root):
                        return self._usage(client)
        except PrefectHTTPStatusError as error:
            if error.response.status_code == 422:
                raise InputError(
                    f"the concurrency limit '{self.name}' has no slot; raise it in Prefect under Concurrency, or with "
                    f"`athanor up --limit {self.name}=1`"
                ) from error
            return f"Prefect's server refused ({error.response.status_code})"
        except httpx.HTTPError as error:
            return f"Prefect's server does not answer ({type(error).__name__})"

    def _take(self, client: SyncPrefectClient) -> None:
        if _create(client, self.name, 1):
            self.logger.info(
                "the concurrency limit '%s' is made, with 1 slot; `athanor up --limit %s=N` gives it more",
                self.name,
                self.name,
            )
        holder = ConcurrencyLeaseHolder(type="flow_run", id=self.flow_run_id) if self.flow_run_id else None
        answer = client.increment_concurrency_slots_with_lease([self.name], 1, "concurrency", LEASE_SECONDS, holder)
        self.lease_id = UUID(answer.json()["lease_id"])
        about = {"lease_id": str(self.lease_id), "limit": self.name, "flow_run_id": self.flow_run_id}
        record_lease(self.root, LeaseRecord(**about, **this_process()))

    def _usage(self, client: SyncPrefectClient) -> str:
        limit = client.read_global_concurrency_limit_by_name(self.name)
        runs = {lease.flow_run_id for lease in read_leases(self.root) if lease.limit == self.name}
        names = [client.read_flow_run(UUID(run)).name for run in sorted(runs - {None})]
        return f"{limit.active_slots} of {limit.limit} in use" + (f", by {', '.join(names)}" if names else "")

    def _renew_until_released(self) -> None:
        is_away = False
        while not self._stop.wait(RENEW_SECONDS):
            try:
                with get_client(sync_client=True) as client:
                    self._renew(client)
                if is_away:
                    log.info("Prefect's server answers again; the slot of '%s' is held", self.name)
                is_away = False
            except Exception as error:  # no error of the renewal may end the job
                if not is_away:
                    log.warning("the slot of '%s' could not be renewed, the job goes on: %s", self.name, error)
                is_away = True

    def _renew(self, client: SyncPrefectClient) -> None:
        try:
            client.renew_concurrency_lease(self.lease_id, LEASE_SECONDS)
        except PrefectHTTPStatusError as error:
            if error.response.status_code not in _GONE:
                raise
            forget_lease(self.root, str(self.lease_id))
            if not self._stop.is_set():  # if it is set, the slot was released just now
                self._take(client)


def _logger() -> logging.Logger | logging.LoggerAdapter:
    try:
        return get_run_logger()
    except MissingContextError:
        return log


def _promptly(call: Callable[[], object]) -> None:
    """Call Prefect's server, and try again within a second if it is busy. Prefect's client would wait two seconds.

    The server's SQLite refuses a call (503) during another write, and the end of a stage makes many writes.
    """
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        for pause in _BUSY_PAUSES:
            try:
                call()
                return
            except PrefectHTTPStatusError as error:
                if error.response.status_code != _BUSY:
                    raise
            time.sleep(pause)
        call()


def _create(client: SyncPrefectClient, name: str, slots: int) -> bool:
    """Make a limit if it is missing, and return whether it was made."""
    try:
        client.read_global_concurrency_limit_by_name(name)
        return False
    except ObjectNotFound:
        pass
    try:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=slots))
        return True
    except ObjectAlreadyExists:  # another process has just made it
        return False
