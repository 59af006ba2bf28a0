"""Starts programs, checks that they answer, restarts programs that die, and ends all of them.

One thread starts and ends the programs, in a loop with a period of a quarter of a second, because Linux ends a child
together with the thread that started it.
"""

import contextlib
import http.client
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flows.prefect_server.processes import begin_log, end_process, log_tail, start_process, trim_log
from flows.service.programs import Program

TURN_SECONDS = 0.25
START_SECONDS = 300.0  # for a loaded laptop with a cold disk; the worker also waits for Prefect's server in this time
FIRST_TRIES = 2  # number of deaths after which a program that never answered is given up
STEADY_SECONDS = 60.0  # after answering for this long, a program's next death counts as its first
MAX_BACKOFF_SECONDS = 30.0
STOP_SECONDS = 15.0
HEALTH_SECONDS = 10.0  # between two health checks of a server that has answered
HANG_SECONDS = 120.0  # silence after which a server hangs; on a machine at load 20 single answers take over ten seconds


class StartFailed(Exception):
    """Raised if a program never answered. The message has the end of the program's log."""


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
        """Print any other line."""
        print(text, flush=True)


@dataclass(slots=True)
class Child:
    """A program and its process. Times are from time.monotonic(), except `started`.

    Attributes:
        process: None while the program waits for its restart.
        started: time of the process's start, in seconds since 1970.
        since: time of the process's start or, once it has answered, of its first answer.
        answered: time of its last answer.
        next_at: earliest time of the next start or of the next health check.
        deaths: number of deaths in a row.
        starts: number of starts in all.
    """

    program: Program
    process: subprocess.Popen | None = None
    is_ready: bool = False
    was_ready: bool = False
    started: float = 0.0
    since: float = 0.0
    answered: float = 0.0
    next_at: float = 0.0
    deaths: int = 0
    starts: int = 0

    def answers(self) -> bool:
        """Whether the program answers now."""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            return self.program.is_up(self.started)
        return False


class Supervisor:
    """A supervisor that keeps programs running.

    Attributes:
        revived: names of programs that died and answer again; the caller that reacts to this removes them.
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
        """Handle every program once: start it, restart it, or check whether it answers.

        Raises:
            StartFailed: a program that never answered has died FIRST_TRIES times or takes longer than START_SECONDS.
        """
        for child in self.children.values():
            if child.process is None:
                if time.monotonic() >= child.next_at:
                    self._start(child)
            elif (status := child.process.poll()) is not None:
                self._died(child, f"died (signal {-status})" if status < 0 else f"died (status {status})")
            elif child.is_ready:
                trim_log(child.program.log_path)
                self._check(child)
            else:
                self._ask(child)

    def _start(self, child: Child) -> None:
        program = child.program
        child.started, child.since = time.time(), time.monotonic()
        child.process = start_process(program.command, program.environment, program.log_path)
        child.starts += 1
        self.lines.show(program.name, "starting", program.address)

    def _check(self, child: Child) -> None:
        """Kill a server that has not answered for HANG_SECONDS; `turn` starts it again.

        A worker is never killed for its silence, because its flow runs would end with it.
        """
        if child.program.shares_session or time.monotonic() < child.next_at:
            return
        if child.answers():
            child.answered = time.monotonic()
        elif time.monotonic() - child.answered > HANG_SECONDS:
            self.lines.show(child.program.name, "hangs", f"no answer for {HANG_SECONDS:.0f} s")
            child.process.kill()
            child.process.wait()
        child.next_at = time.monotonic() + HEALTH_SECONDS

    def _died(self, child: Child, how: str) -> None:
        program = child.program
        if not program.shares_session:
            end_process(child.process, 0)  # ends the rest of its session
        was_steady = child.is_ready and time.monotonic() - child.since > STEADY_SECONDS
        child.deaths = 1 if was_steady else child.deaths + 1
        child.process, child.is_ready = None, False
        if not child.was_ready and child.deaths >= FIRST_TRIES:
            raise StartFailed(_last_words(program, f"{how}, {child.deaths} times"))
        delay = min(MAX_BACKOFF_SECONDS, 2.0 ** (child.deaths - 1) - 1)
        child.next_at = time.monotonic() + delay
        when = f" in {delay:.0f} s" if delay else ""
        self.lines.show(program.name, "waiting", f"{how}; starts again{when}")

    def _ask(self, child: Child) -> None:
        """Check whether a starting program answers now."""
        program = child.program
        if child.answers():
            if child.was_ready:
                self.revived.add(program.name)
            child.is_ready, child.was_ready, child.since = True, True, time.monotonic()
            child.answered = child.next_at = child.since
            note = "  started again" if child.starts > 1 else ""
            note += f", {child.starts - 1} times in all" if child.starts > 2 else ""
            self.lines.show(program.name, "ready", program.address + note)
        elif time.monotonic() - child.since > START_SECONDS:
            if not child.was_ready:
                raise StartFailed(_last_words(program, f"did not answer within {START_SECONDS:.0f} s"))
            end_process(child.process, STOP_SECONDS)

    def ask_to_end(self, name: str) -> None:
        """Tell a program to stop, without waiting. `turn` must not be called afterwards."""
        self.lines.show(name, "stopping")
        self.signal(name, signal.SIGTERM)  # only once: at a second SIGTERM uvicorn and Prefect drop their work

    def signal(self, name: str, signum: int) -> None:
        """Send a signal to a program's own process, if it is running."""
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
