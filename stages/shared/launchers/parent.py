"""`python -m stages.shared.launchers.parent PARENT COMMAND...`: a command that gets SIGTERM when its parent ends.

Linux sends the signal (prctl(2), PR_SET_PDEATHSIG) however the parent ends, even by kill -9. The setting outlives the
exec. Linux sends it when the thread that started the process ends, so that thread has to wait for the process.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def with_parent(command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command as a child of this process and lets it end with this process."""
    return [sys.executable, "-m", "stages.shared.launchers.parent", str(os.getpid()), *command]


def end_with_parent(parent: int, signum: int = signal.SIGTERM) -> None:
    """Let this process get a signal when its parent ends. If the parent has ended already, end at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, so that none of them gets lost."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
