"""Starts programs, sees them answer, restarts those that die or hang, and ends all of them.

One thread does everything, in turns of a quarter of a second: Linux ends a child with the thread that started it.
"""

import contextlib
import http.client
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from flows.prefect_server.processes import begin_log, end_process, log_tail, start_process, trim_log
from flows.service.programs import Program

TURN_SECONDS = 0.25
START_SECONDS = 300.0  # a loaded laptop, a cold disk; the worker waits for Prefect's server meanwhile
FIRST_TRIES = 2  # deaths after which a program that never answered is given up
STEADY_SECONDS = 60.0  # of answering, after which a death counts as the first one
MAX_BACKOFF_SECONDS = 30.0
STOP_SECONDS = 15.0
HEALTH_SECONDS = 10.0  # between two looks at a program that answered
HEALTH_MISSES = 2  # in a row, after which it hangs: at most 40 s, where a look takes 10 s
_BUSY_MISS = 1 / 3  # what a miss counts of a program that computed meanwhile: a loaded machine answers late


class StartFailed(Exception):
    """A program never answered; the text has the end of its log."""


class StatusLines:
    """One line per change of a program's state: its name, the state, and an address or a reason."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def show(self, program: str, state: str, about: str = "") -> None:
        """Print the line unless it equals the program's last one."""
        line = f"{program:<12} {state:<10} {about}".rstrip()
        if self._last.get(program) != line:
            self._last[program] = line
            self.say(line)

    def say(self, text: str) -> None:
        """Print any other line."""
        print(text, flush=True)


@dataclass(slots=True)
class Child:
    """A program and its process.

    Attributes:
        process: None while the program waits for its restart.
        started: time of the process's start, in seconds since 1970.
        since: time of the process's start or, once it has answered, of its first answer; time.monotonic().
        start_at: earliest time of the next start; time.monotonic().
        deaths: in a row; starts: in all.
        look: the running look at whether it still answers.
        look_at: earliest time of the next look; time.monotonic().
        misses: looks in a row at which it did not answer; see `Look.weight`.
    """

    program: Program
    process: subprocess.Popen | None = None
    is_ready: bool = False
    was_ready: bool = False
    started: float = 0.0
    since: float = 0.0
    start_at: float = 0.0
    deaths: int = 0
    starts: int = 0
    look: "Look | None" = None
    look_at: float = 0.0
    misses: float = 0.0


class Look(threading.Thread):
    """Asks a program whether it answers, beside the thread that watches: an answer may take seconds.

    Attributes:
        answers: whether it does; set at the end.
        weight: what a miss counts; less for a process that used the processor during the look.
    """

    def __init__(self, program: Program, started: float, pid: int) -> None:
        super().__init__(name=f"look at {program.name}", daemon=True)
        self._pid, self.weight = pid, 1.0
        self._is_alive, self._since, self.answers = program.is_alive or program.is_up, started, False
        self.start()

    def run(self) -> None:
        before = self._used()
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            self.answers = self._is_alive(self._since)
        if self._used() != before:
            self.weight = _BUSY_MISS

    def _used(self) -> float:
        """Seconds of the processor that the process has used."""
        with contextlib.suppress(psutil.Error):
            return sum(psutil.Process(self._pid).cpu_times()[:2])
        return 0.0


class Supervisor:
    """Keeps programs alive.

    Attributes:
        revived: names of programs that died and answer again; who acts on that removes them.
    """

    def __init__(self, programs: Sequence[Program], lines: StatusLines) -> None:
        self.children = {program.name: Child(program) for program in programs}
        self.lines = lines
        self.revived: set[str] = set()
        for program in programs:
            begin_log(program.log_path)

    def answers(self, *names: str) -> bool:
        """Whether these programs have answered since they were last started."""
        return all(self.children[name].is_ready for name in names)

    def turn(self) -> None:
        """Look at every program once: start it, restart it, or see whether it answers.

        Raises:
            StartFailed: a program that never answered died again and again, or takes minutes.
        """
        for child in self.children.values():
            if child.process is None:
                if time.monotonic() >= child.start_at:
                    self._start(child)
            elif (status := child.process.poll()) is not None:
                self._died(child, f"died (signal {-status})" if status < 0 else f"died (status {status})")
            elif child.is_ready:
                trim_log(child.program.log_path)
                self._look(child)
            else:
                self._ask(child)

    def _start(self, child: Child) -> None:
        program = child.program
        child.started, child.since = time.time(), time.monotonic()
        child.process = start_process(program.command, program.environment, program.log_path)
        child.starts += 1
        self.lines.show(program.name, "starting", program.address)

    def _look(self, child: Child) -> None:
        """See from time to time whether a program still answers; kill one that hangs."""
        if child.look is None:
            if time.monotonic() >= child.look_at:
                child.look = Look(child.program, child.started, child.process.pid)
        elif not child.look.is_alive():
            child.misses = 0.0 if child.look.answers else child.misses + child.look.weight
            child.look, child.look_at = None, time.monotonic() + HEALTH_SECONDS
            if child.misses > HEALTH_MISSES - 0.01:
                child.process.kill()
                child.process.wait()
                self._died(child, "hangs: it did not answer")

    def _died(self, child: Child, how: str) -> None:
        program = child.program
        if not program.shares_session:
            end_process(child.process, 0)  # and the rest of its session
        was_steady = child.is_ready and time.monotonic() - child.since > STEADY_SECONDS
        child.deaths = 1 if was_steady else child.deaths + 1
        child.process, child.is_ready, child.look, child.misses = None, False, None, 0.0
        if not child.was_ready and child.deaths >= FIRST_TRIES:
            raise StartFailed(_last_words(program, f"{how}, {child.deaths} times"))
        delay = min(MAX_BACKOFF_SECONDS, 2.0 ** (child.deaths - 1) - 1)
        child.start_at = time.monotonic() + delay
        when = f" in {delay:.0f} s" if delay else ""
        self.lines.show(program.name, "waiting", f"{how}; starts again{when}")

    def _ask(self, child: Child) -> None:
        """See whether a starting program answers now."""
        program, is_up = child.program, False
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            is_up = program.is_up(child.started)
        if is_up:
            if child.was_ready:
                self.revived.add(program.name)
            child.is_ready, child.was_ready, child.since = True, True, time.monotonic()
            child.look_at = child.since + HEALTH_SECONDS
            note = "  started again" if child.starts > 1 else ""
            note += f", {child.starts - 1} times in all" if child.starts > 2 else ""
            self.lines.show(program.name, "ready", program.address + note)
        elif time.monotonic() - child.since > START_SECONDS:
            if not child.was_ready:
                raise StartFailed(_last_words(program, f"did not answer within {START_SECONDS:.0f} s"))
            end_process(child.process, STOP_SECONDS)

    def ask_to_end(self, name: str) -> None:
        """Tell a program to stop, without waiting; no turn may follow."""
        self.lines.show(name, "stopping")
        self.signal(name, signal.SIGTERM)  # once: at a second one uvicorn and Prefect drop their work

    def signal(self, name: str, signum: int) -> None:
        """Send a program's own process a signal, if it runs."""
        process = self.children[name].process
        if process is not None and process.poll() is None:
            process.send_signal(signum)

    def end(self, name: str) -> None:
        """Wait for a program after `ask_to_end`, and kill the rest of its session."""
        process = self.children[name].process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            end_process(process, 0)
        self.lines.show(name, "stopped")


def _last_words(program: Program, what: str) -> str:
    tail = "\n  ".join(log_tail(program.log_path))
    return f"{program.name} {what}; the end of {program.log_path}:\n  {tail}"
