"""`python -m flows.service.leash PARENT COMMAND...`: become a command that gets SIGTERM when its parent is gone.

Linux sends the signal (prctl(2), PR_SET_PDEATHSIG) however the parent ends, by kill -9 too; the setting outlives the
exec. Other systems do nothing: there the next `athanor up` ends the leftovers.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Returns only if the parent is gone already."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
