"""One log file per rank, named by its global number, and the search for the rank that failed first.

    logs/trainer.log      rank 0, torchrun and the program that starts it
    logs/rank-0001.log    rank 1, and so on

torchrun's own log files are named by the rank's number on its host, in a directory with a random name. Here, a shell
redirects its output and then becomes the rank (`exec`), so that even the output of a crashing interpreter is in the
file.
"""

import re
from collections.abc import Iterable
from pathlib import Path

# $0 is the log directory; the other arguments are the rank's command.
ON_RANK = """\
if [ "$RANK" -gt 0 ]; then exec "$@" >>"$(printf '%s/rank-%04d.log' "$0" "$RANK")" 2>&1; fi
exec "$@\""""
_LAST_BYTES = 400_000
_FAILURE = re.compile(
    r"time\s*: (?P<time>\S+)\s+host\s*: (?P<host>\S+)\s+rank\s*: (?P<rank>\d+) \(local_rank: \d+\)\s+"
    r"exitcode\s*: (?P<status>-?\d+) \(pid"
)
_SIGTERM = -15


def as_rank(log_dir: Path, command: Iterable[str]) -> list[str]:
    """Return the command that torchrun runs as each rank, after its option --no-python."""
    return ["/bin/sh", "-c", ON_RANK, str(log_dir), *command]


def log_of_rank(log_path: Path, rank: int) -> Path:
    """Return the path of a rank's log; the job's log is rank 0's."""
    return log_path if rank == 0 else log_path.with_name(f"rank-{rank:04d}.log")


def remove_rank_logs(log_path: Path) -> None:
    """Remove the ranks' logs of an earlier try."""
    for path in log_path.parent.glob("rank-*.log"):
        path.unlink()


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log; empty if there is no file."""
    return _end_of(path).splitlines()[-count:]


def first_failure(log_path: Path) -> tuple[int, int] | None:
    """Return the rank that failed first and its exit status, from torchrun's reports in the log; None without a report.

    Every host's torchrun reports its own ranks, with a resolution of a second. Within one second, a rank that was ended
    by a signal counts as first: ranks that lose their peer fail with an exit status. Ranks that torchrun stops with
    SIGTERM are never the cause.
    """
    failures = [m.groupdict() for m in _FAILURE.finditer(_end_of(log_path))]
    if not failures:
        return None
    first = min(failures, key=lambda f: (int(f["status"]) == _SIGTERM, f["time"], int(f["status"]) > 0))
    return int(first["rank"]), int(first["status"])


def _end_of(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LAST_BYTES))
        return file.read().decode("utf-8", errors="replace")
