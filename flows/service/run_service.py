"""The life of a service: it locks its root, ends leftover processes, and starts, watches and stops its programs."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

import filelock

from dataset_builders.errors import InputError
from dataset_builders.storage.sqlite_file import check_database
from dataset_builders.storage.store import StorePath, side_dir
from flows.prefect_server.access import (
    MLFLOW_PASSWORD,
    MLFLOW_USER,
    PREFECT_SECRET,
    USER,
    Access,
    make_access,
)
from flows.prefect_server.home import SCHEMA_LOCK, check_prefect_database, prefect_home
from flows.prefect_server.ports import reserve_ports
from flows.prefect_server.processes import end_leftovers, end_marked, flow_run_processes, send, start_process
from flows.prefect_server.service_record import (
    ServiceRecord,
    mlflow_files,
    read_record,
    remove_record,
    service_dir,
    write_record,
)
from flows.service.orphans import find_orphans
from flows.service.programs import Plan, client_environment, mlflow_server, prefect_server, worker
from flows.service.supervisor import TURN_SECONDS, StartFailed, StatusLines, Supervisor
from stages.launchers.owner import Owner
from trainer.contract.names import EXIT_FAILED

SAVE_SECONDS = 150.0  # time for flow runs to stop and save: more than a trainer's stop_grace_seconds
LEFTOVER_SECONDS = 10.0
SCHEMA_SECONDS = 120.0
ORPHAN_SECONDS = 3.0  # between two looks for orphans of killed flow runs


class StopSignal:
    """A counter of Ctrl-C, SIGTERM and SIGHUP. The first asks for an orderly stop, the second for a quick one."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, _signum: int, _frame: FrameType | None) -> None:
        self.times += 1


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Count the signals while the block lasts. They raise no exception."""
    stop = StopSignal()
    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_service(root: StorePath, host: str, max_runs: int, limits: Mapping[str, int]) -> int:
    """Run a service until a signal arrives, and return the exit status.

    Args:
        host: address on which the servers listen.
        max_runs: number of flow runs at a time.
        limits: name of a concurrency limit -> number of slots.

    Raises:
        InputError: a service is already running on this root, another process is making its databases, a database is
            ruined, or a login is wrong.
    """
    directory = service_dir(root)
    directory.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(directory / "service.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise InputError(_runs_already(root)) from None
    lines = StatusLines()
    try:
        access = make_access(host, directory)
        check_prefect_database(prefect_home(root))
        check_database(mlflow_files(root).with_name("mlflow.db"), "earlier runs")
        with stop_signals() as stop:
            if ended := end_leftovers(side_dir(root), LEFTOVER_SECONDS):  # they still occupy last time's ports
                lines.say(f"ended {ended} processes that a killed `athanor up` had left")
            with reserve_ports(directory, host) as ports:
                _serve(Plan(root, access, ports, max_runs, limits), lines, stop)
        return 0
    except StartFailed as error:
        print(f"athanor: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    finally:
        lock.release()


def _runs_already(root: StorePath) -> str:
    record = read_record(root)
    if record is None:
        return f"--root {root}: another `athanor up` is starting or stopping there; wait for it, or choose another root"
    return (
        f"--root {root} is served already by process {record.pid}: Prefect {record.prefect_ui}, "
        f"MLflow {record.mlflow}; use it, stop it with Ctrl-C there, or choose another root"
    )


def _serve(plan: Plan, lines: StatusLines, stop: StopSignal) -> None:
    start, record = time.monotonic(), make_record(plan)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_record, plan.root)
        write_record(plan.root, record)
        lines.say(f"athanor up: root {plan.root}, logs in {service_dir(plan.root)}")
        lines.say(tell_password(plan.access, sys.stdout.isatty()))
        supervisor = Supervisor([prefect_server(plan), mlflow_server(plan), worker(plan)], lines)
        stack.callback(stop_service, supervisor, plan, stop)
        with schemas_alone(plan.root):
            _turn_until(supervisor, lambda: supervisor.answers("prefect", "mlflow"), stop)
        _turn_until(supervisor, lambda: supervisor.answers("worker"), stop)
        if not stop.times:
            write_record(plan.root, record.model_copy(update={"ready": True}))
            lines.say(f"ready after {time.monotonic() - start:.1f} s; Ctrl-C stops everything")
        _watch(supervisor, plan, stop)


def _turn_until(supervisor: Supervisor, is_enough: Callable[[], bool], stop: StopSignal) -> None:
    while not stop.times and not is_enough():
        supervisor.turn()
        time.sleep(TURN_SECONDS)


def _watch(supervisor: Supervisor, plan: Plan, stop: StopSignal) -> None:
    """Keep the programs running until a signal arrives. After a crash of Prefect's server, and where a killed process
    has left orphans, another process ends them and settles their flow runs.

    A worker that was killed does both itself when it starts again.
    """
    settling: subprocess.Popen | None = None
    while not stop.times:
        if supervisor.answers("worker") and (settling is None or settling.poll() is not None):
            orphans = [name for name, _ in find_orphans(plan.root)]
            if orphans:
                supervisor.lines.say(f"ending {', '.join(orphans)}: a parent was killed")
            if orphans or "prefect" in supervisor.revived:
                supervisor.revived.clear()
                command = [sys.executable, "-m", "flows.service.provision", "--reconcile-only"]
                settling = start_process(command, client_environment(plan, "provision"), plan.log_path("provision"))
        next_look = time.monotonic() + ORPHAN_SECONDS
        _turn_until(supervisor, lambda until=next_look: time.monotonic() > until, stop)


@contextlib.contextmanager
def schemas_alone(root: StorePath) -> Iterator[None]:
    """Keep other processes from making the tables of the databases while the block lasts.

    Two processes that make tables at the same time would ruin the database.

    Raises:
        InputError: another process holds a lock for longer than SCHEMA_SECONDS.
    """
    home = prefect_home(root)
    home.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as locks:
        # the locks that flows/tracking/store.py and flows/prefect_server/temporary.py hold
        for path in (side_dir(root) / "mlflow.db.lock", home / SCHEMA_LOCK):
            try:
                locks.enter_context(filelock.FileLock(path, timeout=SCHEMA_SECONDS))
            except filelock.Timeout:
                raise InputError(f"{path} is held by another process; end what runs on that root") from None
        yield


def stop_service(supervisor: Supervisor, plan: Plan, stop: StopSignal) -> None:
    """Stop the service: first the flow runs, so that they save, then the worker, the servers, and what has the mark."""
    side = side_dir(plan.root)
    remove_record(plan.root)
    # At SIGTERM a worker kills its flow runs at once. Without it, the worker takes the next run. So it is suspended.
    supervisor.signal("worker", signal.SIGSTOP)
    _stop_flow_runs(side, supervisor.lines, stop)
    supervisor.ask_to_end("worker")
    supervisor.signal("worker", signal.SIGCONT)
    supervisor.end("worker")
    end_marked(side, "worker", 0)
    for name in ("mlflow", "prefect"):
        supervisor.ask_to_end(name)
    for name in ("mlflow", "prefect"):
        supervisor.end(name)
    end_marked(side, None, 2)


def _stop_flow_runs(side: Path, lines: StatusLines, stop: StopSignal) -> None:
    """Send SIGTERM once to each flow run. Wait until the runs and their children have ended, or for a second Ctrl-C."""
    signalled: set[int] = set()
    deadline, patience = time.monotonic() + SAVE_SECONDS, max(1, stop.times)
    while time.monotonic() < deadline and stop.times <= patience:
        tops, everything = flow_run_processes(side)
        if not everything:
            return
        send([process for process in tops if process.pid not in signalled], signal.SIGTERM)
        signalled |= {process.pid for process in tops}
        lines.show("worker", "stopping", f"flow runs stop and save ({len(tops)}); Ctrl-C again does not wait")
        time.sleep(TURN_SECONDS)


def tell_password(access: Access, is_terminal: bool) -> str:
    """Return the line that says how to log in. It shows the password only on a terminal, as others may read a log."""
    path = access.password_path
    made = path.read_text(encoding="utf-8").strip() if path else ""
    line, word = (made, made.partition(":")[2]) if is_terminal else (f"the line in {path}", "what follows its colon")
    prefect = line if access.prefect == made else f"${PREFECT_SECRET}"
    mlflow = f"the user {USER} with {word}" if access.mlflow == made else f"${MLFLOW_USER} with ${MLFLOW_PASSWORD}"
    return f"log in: Prefect's page takes {prefect}, MLflow's {mlflow}" + (f" (kept in {path})" if is_terminal else "")


def make_record(plan: Plan) -> ServiceRecord:
    """Return the record by which other commands find the service."""
    return ServiceRecord(
        **Owner.of_this_process().model_dump(),
        root=str(plan.root),
        prefect_api=plan.prefect_api,
        prefect_ui=plan.prefect_ui,
        mlflow=plan.mlflow,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
