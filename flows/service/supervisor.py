"""Starts programs, asks them whether they answer, starts again what has died, and ends all of them.

One thread does everything, in turns of a quarter of a second: Linux ends a child with the thread that started it.
"""

import contextlib
import http.client
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flows.service.processes import begin_log, end_process, log_tail, start_process, trim_log
from flows.service.programs import Program
from flows.service.status_lines import StatusLines

TURN_SECONDS = 0.25
START_SECONDS = 240.0  # a loaded laptop, a cold disk
ASK_SECONDS = 5.0  # between two questions to a program that answered
SILENT_SECONDS = 60.0  # without an answer, until it is ended and started again
FIRST_TRIES = 2  # a program that never answered is given up after so many deaths
STEADY_SECONDS = 60.0  # of answering, after which the next death is a first one again
MAX_BACKOFF_SECONDS = 30.0
SERVER_STOP_SECONDS = 15.0


class StartFailed(Exception):
    """A program never answered; the text has the end of its log."""


@dataclass(slots=True)
class Child:
    """A program and the process that it is now.

    Attributes:
        state: waiting (to be started), starting, ready, silent, or ended.
        since: when the state began; started: the process. Both by their clocks: monotonic, and seconds since 1970.
        deaths: in a row; times: starts in all.
    """

    program: Program
    state: str = "waiting"
    process: subprocess.Popen | None = None
    since: float = field(default_factory=time.monotonic)
    started: float = 0.0
    start_at: float = 0.0
    asked: float = 0.0
    deaths: int = 0
    times: int = 0
    was_ready: bool = False
    note: str = ""

    def enter(self, state: str) -> None:
        self.state, self.since = state, time.monotonic()

    @property
    def seconds(self) -> float:
        """In this state."""
        return time.monotonic() - self.since


class Supervisor:
    """Keeps programs alive.

    Args:
        on_death: hears the name of a program that has died after it was ready, once it is ready again.
    """

    def __init__(self, programs: Sequence[Program], lines: StatusLines, on_death: Callable[[str], None]) -> None:
        self.children = {program.name: Child(program) for program in programs}
        self.lines, self.on_death = lines, on_death
        self._next: dict[str, Program] = {}
        for child in self.children.values():
            begin_log(child.program.log_path)
            self._show(child)

    def add(self, program: Program) -> None:
        """Run a program that does its work and ends; where one of its name has not ended yet, after that."""
        old = self.children.get(program.name)
        if old is None or old.state == "ended":
            self.children[program.name] = Child(program)
        else:
            self._next[program.name] = program

    @property
    def is_ready(self) -> bool:
        """Whether everything answers."""
        return all(child.state in ("ready", "ended") for child in self.children.values())

    def turn(self) -> None:
        """Look at every program once, and do what is to be done.

        Raises:
            StartFailed: one that has never answered died again and again.
        """
        for child in list(self.children.values()):
            before = (child.state, child.note)
            self._look(child)
            if (child.state, child.note) != before:
                self._show(child)

    def _look(self, child: Child) -> None:
        if child.state == "ended":
            return
        if child.state == "waiting":
            if time.monotonic() >= child.start_at and self._may_start(child):
                self._start(child)
            return
        if (status := child.process.poll()) is not None:
            self._died(child, status)
        elif child.program.lasts:
            self._ask(child)

    def _may_start(self, child: Child) -> bool:
        needed = self.children.get(child.program.needs or "")
        return needed is None or needed.state == "ready"

    def _start(self, child: Child) -> None:
        child.started = time.time()
        child.process = start_process(child.program.command, child.program.environment, child.program.log_path)
        child.times += 1
        child.note = ""
        child.enter("starting")

    def _died(self, child: Child, status: int) -> None:
        if not child.program.shares_session:
            end_process(child.process, 0)  # whatever it has left in its session
        if not child.program.lasts:
            self._finished(child, status)
            return
        steady = child.state == "ready" and child.seconds > STEADY_SECONDS
        child.deaths = 1 if steady else child.deaths + 1
        if not child.was_ready and child.deaths >= FIRST_TRIES:
            raise StartFailed(self._last_words(child, f"ended with {_how(status)}, {child.deaths} times"))
        delay = min(MAX_BACKOFF_SECONDS, 2.0 ** (child.deaths - 1) - 1)
        child.start_at = time.monotonic() + delay
        child.note = f"died ({_how(status)}); starts again" + (f" in {delay:.0f} s" if delay else "")
        child.enter("waiting")

    def _finished(self, child: Child, status: int) -> None:
        tail = log_tail(child.program.log_path, 1)
        child.note = (tail[0] if tail else "") if status == 0 else f"{_how(status)}: {' '.join(tail)}"
        child.enter("ended" if status == 0 else "failed")
        if status != 0:
            self.lines.show(child.program.name, "failed", f"{child.note}  (log: {child.program.log_path})")
            child.state = "ended"
        if (program := self._next.pop(child.program.name, None)) is not None:
            self.children[program.name] = Child(program)

    def _ask(self, child: Child) -> None:
        if not self._may_start(child):  # it cannot answer, and is not to blame
            child.since = time.monotonic()
            return
        if child.state == "ready" and time.monotonic() - child.asked < ASK_SECONDS:
            return
        child.asked = time.monotonic()
        trim_log(child.program.log_path)
        if self._is_up(child):
            self._answered(child)
        elif child.state == "ready":
            child.enter("silent")
        elif child.state == "silent" and child.seconds > SILENT_SECONDS:
            end_process(child.process, SERVER_STOP_SECONDS)
        elif child.state == "starting" and child.seconds > START_SECONDS:
            if not child.was_ready:
                raise StartFailed(self._last_words(child, f"did not answer within {START_SECONDS:.0f} s"))
            end_process(child.process, SERVER_STOP_SECONDS)

    def _answered(self, child: Child) -> None:
        if child.state == "ready":
            return
        was_dead = child.was_ready and child.state == "starting"
        child.was_ready = True
        child.note = f"started again, {child.times - 1} times in all" if child.times > 2 else child.note
        child.note = "started again" if child.times == 2 else child.note
        child.enter("ready")
        if was_dead:
            self.on_death(child.program.name)

    def _is_up(self, child: Child) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            return child.program.is_up(child.started)
        return False

    def _last_words(self, child: Child, what: str) -> str:
        tail = "\n  ".join(log_tail(child.program.log_path))
        return f"{child.program.name} {what}; the end of {child.program.log_path}:\n  {tail}"

    def _show(self, child: Child) -> None:
        needs = f"for {child.program.needs}" if child.state == "waiting" and not child.times else ""
        about = "  ".join(part for part in (child.program.address, child.note, needs) if part)
        state = "registered" if child.state == "ended" else child.state
        if child.state == "waiting" and not child.program.needs and not child.times:
            return
        self.lines.show(child.program.name, state, about)

    def answers(self, name: str) -> bool:
        """Whether that program did when it was last asked."""
        return self.children[name].state == "ready"

    def ask_to_end(self, name: str) -> None:
        """Tell a program to stop, and go on; no turn may follow."""
        process = self.children[name].process
        if process is not None and process.poll() is None:
            self.lines.show(name, "stopping")
            process.terminate()  # once: a second SIGTERM makes uvicorn and Prefect drop what they do

    def signal(self, name: str, signum: int) -> None:
        """Send a program's own process a signal, if it runs."""
        process = self.children[name].process
        if process is not None and process.poll() is None:
            process.send_signal(signum)

    def end(self, name: str) -> None:
        """Wait for a program that was asked to end, and kill what is left of it."""
        child = self.children[name]
        if child.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(SERVER_STOP_SECONDS)
            end_process(child.process, 0)
            self.lines.show(name, "stopped")
        child.enter("ended")


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"
