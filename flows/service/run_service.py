"""The life of a service: alone on its root, leftovers ended, everything started, watched, and stopped together."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import filelock
import psutil

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import StorePath, side_dir
from flows.service.database import schemas_made_alone
from flows.service.options import Options
from flows.service.orphans import OrphanWatch
from flows.service.ports import reserve_ports
from flows.service.prefect_home import SCHEMA_LOCK, prefect_home
from flows.service.prefect_template import take_tables
from flows.service.processes import end_leftovers, end_marked, flow_run_processes, send
from flows.service.programs import Plan, mlflow_server, prefect_server, provision, worker
from flows.service.record import ServiceRecord, read_record, remove_record, service_dir, write_record
from flows.service.status_lines import StatusLines, make_status_lines
from flows.service.supervisor import TURN_SECONDS, StartFailed, Supervisor
from trainer.contract import EXIT_FAILED

SAVE_SECONDS = 150.0  # for flow runs to stop and save: more than a trainer's stop_grace_seconds
LEFTOVER_SECONDS = 10.0
SCHEMA_SECONDS = 120.0
ORPHAN_SECONDS = 3.0  # between two looks for what killed flow runs have left


class StopSignal:
    """Counts Ctrl-C, SIGTERM and the terminal's end: the first asks for an orderly stop, the second for a quick one."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, _signum: int, _frame: FrameType | None) -> None:
        self.times += 1


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Signals are counted while the block lasts, and raise nothing."""
    stop = StopSignal()
    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_service(options: Options) -> int:
    """Run until a signal; returns the exit status.

    Raises:
        InputError: a service runs on this root already, or the database cannot be used.
    """
    directory = service_dir(options.root)
    directory.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(directory / "service.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise InputError(_runs_already(options.root)) from None
    lines = make_status_lines(sys.stdout.isatty())
    try:
        with stop_signals() as stop:
            return _serve(options, lines, stop)
    except StartFailed as error:
        lines.close()
        print(f"athanor: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    finally:
        lines.close()
        lock.release()


def _runs_already(root: StorePath) -> str:
    found = read_record(root)
    if found is None:
        return f"--root {root}: another `athanor up` is starting or stopping there; wait for it, or choose another root"
    return (
        f"--root {root} is served already by process {found.pid}: Prefect {found.prefect_ui}, MLflow {found.mlflow}; "
        "use it, stop it with Ctrl-C there, or choose another root"
    )


def _serve(options: Options, lines: StatusLines, stop: StopSignal) -> int:
    began = time.monotonic()
    root = options.root
    if ended := end_leftovers(side_dir(root), LEFTOVER_SECONDS):
        lines.say(f"ended {ended} processes that a killed `athanor up` had left")
    with contextlib.ExitStack() as held:
        ports = held.enter_context(reserve_ports(service_dir(root), options.access.host))
        plan = Plan(root, options.access, ports, options.database, options.max_runs, options.limits)
        record = make_record(plan)
        write_record(root, record)
        held.callback(remove_record, root)
        lines.say(f"athanor up: root {root}, {_where(plan)}, logs in {service_dir(root)}")
        supervisor = _start(plan, lines, stop, held)
        if not stop.times:
            write_record(root, record.model_copy(update={"ready": True}))
            lines.say(f"ready after {time.monotonic() - began:.1f} s; Ctrl-C stops everything")
        _watch(supervisor, root, lines, stop)
    return 0


def _start(plan: Plan, lines: StatusLines, stop: StopSignal, held: contextlib.ExitStack) -> Supervisor:
    programs = [prefect_server(plan), mlflow_server(plan), worker(plan), provision(plan, is_first=True)]
    with schemas_alone(plan):
        supervisor = Supervisor(programs, lines, lambda _: supervisor.add(provision(plan, is_first=False)))
        held.callback(stop_service, supervisor, plan, lines, stop)
        _until(supervisor, lambda: supervisor.answers("prefect") and supervisor.answers("mlflow"), stop)
    _until(supervisor, lambda: supervisor.is_ready, stop)
    return supervisor


def _until(supervisor: Supervisor, is_enough: Callable[[], bool], stop: StopSignal) -> None:
    while not stop.times and not is_enough():
        supervisor.turn()
        time.sleep(TURN_SECONDS)


def _watch(supervisor: Supervisor, root: StorePath, lines: StatusLines, stop: StopSignal) -> None:
    """Until a signal: keep the programs alive, and end what flow runs have left that were killed."""
    orphans, told = OrphanWatch(root), set()
    while not stop.times:
        found = set(orphans.poll())
        for name in sorted(found - told):
            lines.say(f"ending {name}: its parent was killed")
        told = found
        next_look = time.monotonic() + ORPHAN_SECONDS
        _until(supervisor, lambda until=next_look: time.monotonic() > until, stop)


@contextlib.contextmanager
def schemas_alone(plan: Plan) -> Iterator[None]:
    """While the block lasts, nobody else makes a database's tables: two at once would ruin them.

    Raises:
        InputError: Postgres cannot be used, or somebody else takes minutes.
    """
    if plan.database is not None:
        with schemas_made_alone(plan.database):
            yield
        return
    home = prefect_home(plan.root)
    home.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        # those of stages/tracking_store.py and prefect_schema.py
        for path in (side_dir(plan.root) / "mlflow.db.lock", home / SCHEMA_LOCK):
            try:
                held.enter_context(filelock.FileLock(path, timeout=SCHEMA_SECONDS))
            except filelock.Timeout:
                raise InputError(f"{path} is held by another process; end what runs on that root") from None
        take_tables(home)
        yield


def stop_service(supervisor: Supervisor, plan: Plan, lines: StatusLines, stop: StopSignal) -> None:
    """Flow runs first, so that they save and say so; then the worker; then the servers; then whatever has the mark."""
    side = side_dir(plan.root)
    remove_record(plan.root)
    supervisor.ask_to_end("deployments")
    # Told to stop, a worker kills its flow runs at once; left alone, it would take the next ones. So it is held.
    supervisor.signal("worker", signal.SIGSTOP)
    _stop_flow_runs(side, lines, stop)
    supervisor.ask_to_end("worker")
    supervisor.signal("worker", signal.SIGCONT)
    supervisor.end("worker")
    end_marked(side, "worker", 0)
    supervisor.ask_to_end("mlflow")
    supervisor.ask_to_end("prefect")
    for name in ("deployments", "mlflow", "prefect"):
        supervisor.end(name)
    end_marked(side, None, 2)


def _stop_flow_runs(side: Path, lines: StatusLines, stop: StopSignal) -> None:
    """SIGTERM to each, once, and wait until they and what they have started are gone, or a second Ctrl-C."""
    asked: set[int] = set()
    deadline, patience = time.monotonic() + SAVE_SECONDS, max(1, stop.times)
    while time.monotonic() < deadline and stop.times <= patience:
        tops, everything = flow_run_processes(side)
        if not everything:
            return
        send([process for process in tops if process.pid not in asked], signal.SIGTERM)
        asked |= {process.pid for process in tops}
        lines.show("worker", "stopping", f"flow runs stop and save ({len(tops)}); Ctrl-C again does not wait")
        time.sleep(TURN_SECONDS)


def make_record(plan: Plan) -> ServiceRecord:
    """What other commands find the service by."""
    return ServiceRecord(
        pid=os.getpid(),
        pid_started=psutil.Process().create_time(),
        host=socket.gethostname(),
        root=str(plan.root),
        prefect_api=plan.prefect_api,
        prefect_ui=plan.prefect_ui,
        mlflow=plan.mlflow,
        database="postgresql" if plan.database else "sqlite",
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _where(plan: Plan) -> str:
    return f"Postgres {plan.database.place}" if plan.database else "SQLite"
