"""Named concurrency limits: how many jobs may use a GPU host, a partition or a namespace at once.

They are Prefect's global concurrency limits, of the server of PREFECT_API_URL; a temporary server of one's own shares
with nobody, and there no slot is asked for. A limit that the server does not know is made with one slot. A slot is held
under a lease of a minute that is renewed: a killed holder's slot is free after that, and at once for a job on the same
root and host, which sees that the holder is dead.

Prefect's own context manager is not used: it gives up renewing after three failures in a row, the few seconds in which
a server is started again, and another job would then be let in beside this one. Here the renewal goes on until it
succeeds, a slot that was lost meanwhile is taken again, and no job ends because the server is away.
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

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import StorePath
from flows.run_record import LeaseRecord, forget_lease, read_leases, record_lease, this_process
from flows.service.temporary_server import is_temporary
from stages.cluster_config import ClusterConfig

HOST_LIMIT = ClusterConfig().limit
DEFAULT_LIMITS = {HOST_LIMIT: 1}
LEASE_SECONDS = 60.0  # the shortest that Prefect grants
RENEW_SECONDS = 15.0
JOIN_SECONDS = 15.0  # for a renewal that is under way
TRY_SECONDS = 2.0  # between two tries to get a slot
SAY_SECONDS = 60.0  # between two lines about the same wait
SERVER_SECONDS = 600.0  # for the server to come back; a call then fails by itself
_LOCKED, _BUSY, _GONE = 423, 503, (404, 410)
_BUSY_PAUSES = (0.05, 0.1, 0.2, 0.4)
log = logging.getLogger("athanor.limits")


def has_server() -> bool:
    """Whether Prefect's server is one that others may use too, and not a temporary one of this process."""
    return PREFECT_API_URL.value() is not None and not is_temporary()


def wait_for_server(seconds: float = SERVER_SECONDS) -> None:
    """Where the server is away, wait for it to come back: after hours of work the next call would fail the run."""
    if not has_server():
        return
    deadline, is_away = time.monotonic() + seconds, False
    while time.monotonic() < deadline:
        with get_client(sync_client=True) as client:
            if (problem := client.api_healthcheck()) is None:
                return
        if not is_away:
            log.warning("Prefect's server is away (%s); what is finished is kept, waiting for it", problem)
        is_away = True
        time.sleep(TRY_SECONDS)


def create_limits(limits: Mapping[str, int]) -> None:
    """Give the server these limits; may be called again at any time.

    A limit that is named here gets these slots. The one of this host is made with one slot where it is missing, and
    otherwise left as a person has set it.

    Args:
        limits: name -> slots.

    Raises:
        InputError: a limit of less than one slot, which would let nothing run.
    """
    for name, slots in limits.items():
        if slots < 1:
            raise InputError(f"--limit {name}={slots}: a limit of less than 1 slot lets nothing run; give 1 or more")
    with get_client(sync_client=True) as client:
        for name, slots in {**DEFAULT_LIMITS, **limits}.items():
            if not _create(client, name, slots) and name in limits:
                client.update_global_concurrency_limit(name, GlobalConcurrencyLimitUpdate(limit=slots))


def free_dead_slots(client: SyncPrefectClient, root: StorePath) -> int:
    """Give back the slots whose holders on this host are dead; returns how many."""
    dead = [lease for lease in read_leases(root) if lease.is_dead()]
    for lease in dead:
        client.release_concurrency_slots_with_lease(UUID(lease.lease_id))
        forget_lease(root, lease.lease_id)
    return len(dead)


@contextlib.contextmanager
def slot_of(name: str, root: StorePath) -> Iterator[None]:
    """Hold a slot of a limit while the block lasts; waits for one, and says in the run's log for what.

    Args:
        root: where it is noted who holds it.

    Raises:
        InputError: the limit is switched to 0 slots.
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
        here = contextvars.copy_context()  # Prefect's settings among it, which name the server that gives the slot
        renew = partial(here.run, self._renew_until_released)
        self._thread = threading.Thread(target=renew, name=f"slot-{name}", daemon=True)

    def acquire(self) -> None:
        """Wait for a slot, as long as it takes."""
        said, began = 0.0, time.monotonic()
        while (why := self._try()) is not None:
            if not said or time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                self.logger.info("waiting for a slot of the concurrency limit '%s': %s", self.name, why)
            time.sleep(TRY_SECONDS)
        if said:
            self.logger.info("got a slot of '%s' after %.0f s", self.name, time.monotonic() - began)
        self._thread.start()

    def release(self) -> None:
        """Give the slot back; where the server is away, its lease ends by itself."""
        self._stop.set()
        self._thread.join(JOIN_SECONDS)  # else it could take the slot again after it was given back
        if self.lease_id is None:
            return
        try:
            with get_client(sync_client=True) as client:
                _promptly(lambda: client.release_concurrency_slots_with_lease(self.lease_id))
        except (httpx.HTTPError, PrefectHTTPStatusError) as error:
            self.logger.warning("the slot of '%s' ends by itself within a minute: %s", self.name, error)
        forget_lease(self.root, str(self.lease_id))

    def _try(self) -> str | None:
        """None with a slot in hand, else why there is none."""
        try:
            with get_client(sync_client=True) as client:
                try:
                    _promptly(lambda: self._take(client))
                    return None
                except PrefectHTTPStatusError as error:
                    if error.response.status_code != _LOCKED:
                        raise
                return None if free_dead_slots(client, self.root) and self._take_freed(client) else self._who(client)
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
                "the concurrency limit '%s' was not there: made with 1 slot; `athanor up --limit %s=N` gives it more",
                self.name,
                self.name,
            )
        holder = ConcurrencyLeaseHolder(type="flow_run", id=self.flow_run_id) if self.flow_run_id else None
        answer = client.increment_concurrency_slots_with_lease([self.name], 1, "concurrency", LEASE_SECONDS, holder)
        self.lease_id = UUID(answer.json()["lease_id"])
        about = {"lease_id": str(self.lease_id), "limit": self.name, "flow_run_id": self.flow_run_id}
        record_lease(self.root, LeaseRecord(**about, **this_process()))

    def _take_freed(self, client: SyncPrefectClient) -> bool:
        try:
            self._take(client)
            return True
        except PrefectHTTPStatusError:
            return False

    def _who(self, client: SyncPrefectClient) -> str:
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
            except Exception as error:  # whatever it is, the job goes on
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
            if not self._stop.is_set():  # else it is gone because it was given back, just now
                self._take(client)


def _logger() -> logging.Logger | logging.LoggerAdapter:
    try:
        return get_run_logger()
    except MissingContextError:
        return log


def _promptly(call: Callable[[], object]) -> None:
    """Ask Prefect's server without its client's patience, which is two seconds before a second try.

    Its SQLite refuses at once (503) what meets another write, and the end of a stage, just before, makes many.
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
    """Make a limit if it is not there; whether it was missing."""
    try:
        client.read_global_concurrency_limit_by_name(name)
        return False
    except ObjectNotFound:
        pass
    try:
        client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=slots))
        return True
    except ObjectAlreadyExists:  # by another, just now
        return False
