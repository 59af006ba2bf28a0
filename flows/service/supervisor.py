"""`athanor up`: starts Prefect's server, MLflow's server and the worker, keeps them running, and ends them together.

One thread does all of it, in a loop with a period of a quarter of a second, because Linux ends a child together with
the thread that started it: if this process is killed, the three programs get SIGTERM. In the same way, the flow runs
get SIGTERM if the worker is killed, and a trainer if its flow is (`stages/shared/launchers/parent.py`).
What a killed process left in Prefect and MLflow, the worker settles (`reconcile.py`).
"""

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType

import filelock
import psutil

from dataset_builders.errors import InputError
from dataset_builders.storage.files import check_database, trim_log, write_json
from dataset_builders.storage.store import StorePath, side_dir
from flows.pipeline.processes import SERVICE_VARIABLE, begin_log, end_process, kill_after, log_tail, start_process
from flows.service.access import MLFLOW_PASSWORD, MLFLOW_USER, USER, Access, make_access
from flows.service.programs import Program, Service, mlflow_server, prefect_server, silence, worker
from flows.service.schedules import refused_schedules
from flows.tracking.servers import (
    PREFECT_SECRET,
    SCHEMA_LOCK,
    ServiceRecord,
    check_prefect_database,
    mlflow_database,
    prefect_home,
    read_record,
    remove_record,
    reserve_ports,
    service_dir,
    write_record,
)
from stages.shared.launchers.parent import adopt_orphans
from stages.shared.launchers.processes import Owner, runs
from trainer.contract.names import EXIT_FAILED

TURN_SECONDS = 0.25
START_SECONDS = 300.0  # for a loaded laptop with a cold disk; the worker also waits for Prefect's server in this time
FIRST_TRIES = 2  # number of deaths after which a program that never answered is given up
STEADY_SECONDS = 60.0  # after answering for this long, a program's next death counts as its first
MAX_BACKOFF_SECONDS = 30.0
HEALTH_SECONDS = 10.0  # between two health checks of a server that has answered
HANG_SECONDS = 120.0  # silence after which a server hangs; on a machine at load 20 single answers take over ten seconds
STOP_SECONDS = 15.0
SAVE_SECONDS = 150.0  # time for flow runs to stop and save: more than a trainer's stop_grace_seconds
LEFTOVER_SECONDS = 10.0
SCHEMA_SECONDS = 120.0


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
    try:
        access = make_access(host, directory)
        check_prefect_database(prefect_home(root))
        check_database(mlflow_database(root), "earlier runs")
        with stop_signals() as stop:
            if ended := end_leftovers(directory, LEFTOVER_SECONDS):  # they still occupy last time's ports
                print(f"ended {ended} processes that a killed `athanor up` had left", flush=True)
            with reserve_ports(directory, host) as ports:
                _serve(Service(root, access, ports, max_runs, limits), stop)
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


def _serve(service: Service, stop: "StopSignal") -> None:
    adopt_orphans()
    start, lines = time.monotonic(), StatusLines()
    record = ServiceRecord(
        **Owner.of_this_process().model_dump(),
        root=str(service.root),
        prefect_api=service.prefect_api,
        prefect_ui=service.prefect_ui,
        mlflow=service.mlflow,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_record(service.root, record)
    lines.say(f"athanor up: root {service.root}, logs in {service_dir(service.root)}")
    lines.say(tell_password(service.access, sys.stdout.isatty()))
    supervisor = Supervisor([prefect_server(service), mlflow_server(service), worker(service)], lines)
    try:
        with schemas_alone(service.root):
            supervisor.turn_until(lambda: stop.times or supervisor.is_ready("prefect", "mlflow"))
        supervisor.turn_until(lambda: stop.times or supervisor.is_ready("worker"))
        if not stop.times:
            write_record(service.root, record.model_copy(update={"ready": True}))
            lines.say(f"ready after {time.monotonic() - start:.1f} s; Ctrl-C stops everything")
            for line in refused_schedules(service.prefect_api, service.access.prefect):
                lines.say(line)
        supervisor.turn_until(lambda: stop.times)
    finally:
        remove_record(service.root)
        supervisor.end(stop)


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


def end_leftovers(directory: Path, seconds: float) -> int:
    """Wait until the programs of a killed service, which got SIGTERM when it died, have ended. Kill them after
    `seconds`. Return how many were still running. Those of another root, whose copy this root is, are left alone."""
    owners = []
    for path in directory.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):  # it is half written: its writer was killed
            owners.append(Owner.model_validate_json(path.read_bytes()))
    living = [owner for owner in owners if owner.host == socket.gethostname() and not owner.is_dead()]
    left = [owner for owner in living if _serves(owner, directory.parent)]
    _wait(lambda: all(owner.is_dead() for owner in left), seconds)
    for owner in left:
        if not owner.is_dead():
            os.kill(owner.pid, signal.SIGKILL)
    _wait(lambda: all(owner.is_dead() for owner in left), 5)
    return len(left)


def _serves(owner: Owner, side: Path) -> bool:
    """Whether a process is a program of the service of a root, whose directory on this machine is `side`."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(owner.pid).environ().get(SERVICE_VARIABLE) == str(side)
    return False


def _wait(is_enough: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_enough() and time.monotonic() < deadline:
        time.sleep(TURN_SECONDS)


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
        # the locks that flows/tracking/store.py and flows/pipeline/temporary_server.py hold
        for path in (side_dir(root) / "mlflow.db.lock", home / SCHEMA_LOCK):
            try:
                locks.enter_context(filelock.FileLock(path, timeout=SCHEMA_SECONDS))
            except filelock.Timeout:
                raise InputError(f"{path} is held by another process; end what runs on that root") from None
        yield


def tell_password(access: Access, is_terminal: bool) -> str:
    """Return the line that says how to log in. It shows the password only on a terminal, as others may read a log."""
    path = access.password_path
    made = path.read_text(encoding="utf-8").strip() if path else ""
    line, word = (made, made.partition(":")[2]) if is_terminal else (f"the line in {path}", "what follows its colon")
    prefect = line if access.prefect == made else f"${PREFECT_SECRET}"
    mlflow = f"the user {USER} with {word}" if access.mlflow == made else f"${MLFLOW_USER} with ${MLFLOW_PASSWORD}"
    return f"log in: Prefect's page takes {prefect}, MLflow's {mlflow}" + (f" (kept in {path})" if is_terminal else "")


class StatusLines:
    """A printer of one line per change of a program's state: its name, the state, and an address or a reason."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def show(self, program: str, state: str, about: str = "") -> None:
        """Print the line unless it equals the program's last line."""
        line = f"{program:<12} {state:<10} {about}".rstrip()
        if self._last.get(program) != line:
            self._last[program] = line
            self.say(line)

    def say(self, text: str) -> None:
        """Print any other line; a full disk may lose it."""
        with on_a_full_disk():
            print(text, flush=True)


@contextlib.contextmanager
def on_a_full_disk(otherwise: Callable[[], None] | None = None) -> Iterator[None]:
    """Give up what is done inside where the disk is full, and call `otherwise`: a service outlives a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        if otherwise is not None:
            otherwise()


class StartFailed(Exception):
    """Raised if a program never answered. The message has the end of the program's log."""

    def __init__(self, program: Program, what: str) -> None:
        tail = "\n  ".join(log_tail(program.log_path))
        super().__init__(f"{program.name} {what}; the end of {program.log_path}:\n  {tail}")


class Supervisor:
    """A supervisor that keeps programs running."""

    def __init__(self, programs: Sequence[Program], lines: StatusLines) -> None:
        self.programs = {program.name: program for program in programs}
        self.lines = lines
        for program in programs:
            begin_log(program.log_path)

    def is_ready(self, *names: str) -> bool:
        """Whether these programs have answered since they were last started."""
        return all(self.programs[name].is_ready for name in names)

    def turn_until(self, is_enough: Callable[[], object]) -> None:
        """Keep the programs running until something is so. See `turn`."""
        while not is_enough():
            self.turn()
            time.sleep(TURN_SECONDS)

    def turn(self) -> None:
        """Handle every program once: start it, restart it, or check whether it answers.

        Raises:
            StartFailed: a program that never answered has died FIRST_TRIES times or takes longer than START_SECONDS.
        """
        for program in self.programs.values():
            if program.process is None:
                if time.monotonic() >= program.next_at:
                    with on_a_full_disk(partial(self._wait_for_room, program)):
                        self._start(program)
            elif (status := program.process.poll()) is not None:
                self._died(program, f"died (signal {-status})" if status < 0 else f"died (status {status})")
            elif not program.is_ready:
                self._ask(program)
            else:
                with on_a_full_disk():
                    trim_log(program.log_path)
                if time.monotonic() >= program.next_at:
                    self._check(program)

    def _start(self, program: Program) -> None:
        program.started, program.since = time.time(), time.monotonic()
        program.process = start_process(program.command, program.environment, program.log_path)
        born = psutil.Process(program.process.pid).create_time()
        owner = Owner(pid=program.process.pid, pid_started=born, host=socket.gethostname())
        try:
            write_json(program.log_path.with_suffix(".pid"), owner.model_dump())  # for `end_leftovers`
        except OSError:
            program.process.kill()
            program.process.wait()
            program.process = None
            raise
        program.starts += 1
        self.lines.show(program.name, "starting", program.address)

    def _wait_for_room(self, program: Program) -> None:
        program.next_at = time.monotonic() + MAX_BACKOFF_SECONDS
        how_often = f"tries again every {MAX_BACKOFF_SECONDS:.0f} s"
        self.lines.show(program.name, "waiting", f"the disk of {program.log_path} is full; {how_often}")

    def _ask(self, program: Program) -> None:
        """Check whether a starting program answers now."""
        if _answers(program):
            program.is_ready, program.was_ready, program.since = True, True, time.monotonic()
            program.answered = program.next_at = program.since
            note = "  started again" if program.starts > 1 else ""
            note += f", {program.starts - 1} times in all" if program.starts > 2 else ""
            self.lines.show(program.name, "ready", program.address + note)
        elif time.monotonic() - program.since > START_SECONDS:
            if not program.was_ready:
                raise StartFailed(program, f"did not answer within {START_SECONDS:.0f} s")
            end_process(program.process, STOP_SECONDS)

    def _check(self, program: Program) -> None:
        """Kill a server that has not answered for HANG_SECONDS; `turn` starts it again. Tell of a worker without a
        heartbeat."""
        if program.heartbeat is not None:
            self._listen(program)
        elif _answers(program):
            program.answered = time.monotonic()
        elif time.monotonic() - program.answered > HANG_SECONDS:
            self.lines.show(program.name, "hangs", f"no answer for {HANG_SECONDS:.0f} s")
            program.process.kill()
            program.process.wait()
        program.next_at = time.monotonic() + HEALTH_SECONDS

    def _listen(self, program: Program) -> None:
        silent = silence(program.heartbeat())
        if silent:
            pid = program.process.pid
            way_out = f"`kill -CONT {pid}` wakes it, `kill -9 {pid}` starts another, and its flow runs save and end"
            self.lines.show(program.name, "silent", f"{silent}; {way_out}")
        elif program.is_silent:
            self.lines.show(program.name, "ready", program.address)
        program.is_silent = bool(silent)

    def _died(self, program: Program, how: str) -> None:
        was_steady = program.is_ready and time.monotonic() - program.since > STEADY_SECONDS
        program.deaths = 1 if was_steady else program.deaths + 1
        program.process, program.is_ready, program.is_silent = None, False, False
        if not program.was_ready and program.deaths >= FIRST_TRIES:
            raise StartFailed(program, f"{how}, {program.deaths} times")
        delay = min(MAX_BACKOFF_SECONDS, 2.0 ** (program.deaths - 1) - 1)
        program.next_at = time.monotonic() + delay
        when = f" in {delay:.0f} s" if delay else ""
        self.lines.show(program.name, "waiting", f"{how}; starts again{when}")

    def end(self, stop: StopSignal) -> None:
        """End everything: first the flow runs, so that they save, then the worker, the servers, and what is left.
        `turn` must not be called afterwards."""
        # At SIGTERM a worker kills its flow runs at once. Without it, it takes the next run. So it is suspended.
        self._signal("worker", signal.SIGSTOP)
        self._end_flow_runs(stop)
        self._signal("worker", signal.SIGTERM)
        self._signal("worker", signal.SIGCONT)
        self._wait_for("worker")
        for process in self._others():
            with contextlib.suppress(psutil.Error):
                process.kill()
        _wait(lambda: not self._others(), 5)
        for name in ("mlflow", "prefect"):
            self._signal(name, signal.SIGTERM)  # only once: at a second SIGTERM uvicorn drops its work
        for name in ("mlflow", "prefect"):
            self._wait_for(name)

    def _signal(self, name: str, signum: int) -> None:
        """Send a signal to a program that is running."""
        if signum == signal.SIGTERM:
            self.lines.show(name, "stopping")
        process = self.programs[name].process
        if process is not None:
            process.send_signal(signum)

    def _wait_for(self, name: str) -> None:
        program = self.programs[name]
        if program.process is not None:
            kill_after(program.process, STOP_SECONDS)
        program.log_path.with_suffix(".pid").unlink(missing_ok=True)
        self.lines.show(name, "stopped")

    def _end_flow_runs(self, stop: StopSignal) -> None:
        """Send SIGTERM once to each flow run. Wait until the runs and their children have ended, or for a second
        Ctrl-C."""
        signalled: set[psutil.Process] = set()
        deadline, patience = time.monotonic() + SAVE_SECONDS, max(1, stop.times)
        while self._others() and time.monotonic() < deadline and stop.times <= patience:
            flow_runs = self._children_of_worker()
            for process in flow_runs - signalled:
                with contextlib.suppress(psutil.Error):
                    process.terminate()
            signalled |= flow_runs
            about = f"flow runs stop and save ({len(flow_runs)}); Ctrl-C again does not wait"
            self.lines.show("worker", "stopping", about)
            time.sleep(TURN_SECONDS)

    def _children_of_worker(self) -> set[psutil.Process]:
        process = self.programs["worker"].process
        with contextlib.suppress(psutil.Error):
            if process is not None:
                return {child for child in psutil.Process(process.pid).children() if runs(child)}
        return set()

    def _others(self) -> list[psutil.Process]:
        """Return the processes below this one that are no programs: flow runs, trainers, and their helpers."""
        ours = {program.process.pid for program in self.programs.values() if program.process is not None}
        below = psutil.Process().children(recursive=True)
        return [process for process in below if process.pid not in ours and runs(process)]


def _answers(program: Program) -> bool:
    with contextlib.suppress(ValueError, KeyError):  # another program has the port, and answers otherwise
        return program.answers(program)
    return False
