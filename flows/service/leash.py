"""`python -m flows.service.leash PARENT COMMAND...`: become a command that gets SIGTERM when its parent ends.

Linux sends the signal (prctl(2), PR_SET_PDEATHSIG) however the parent ends, even by kill -9. The setting outlives the
exec. Other systems send no signal; there the next `athanor up` ends the leftover processes.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Become the command. Return 1 if the parent has ended already."""
    parent, command = int(arguments[0]), arguments[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
