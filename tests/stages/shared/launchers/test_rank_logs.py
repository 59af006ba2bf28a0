"""The rank that failed first, found in the reports of several hosts' torchrun in one log, and the lines of this
rank."""

import subprocess

import pytest

from stages.shared.launchers.job import as_rank, first_failure, last_lines, log_of_rank, remove_rank_logs


def _report(*failures: tuple[str, int, int]) -> str:
    """Return a report as torch 2.13 writes it: (time, rank, exit status), the root cause of that host last."""
    lines = ["=" * 40, "trainer FAILED", "-" * 40, "Failures:"]
    for number, (when, rank, status) in enumerate(failures):
        lines += [f"[{number}]:", f"  time      : 2026-11-21_12:00:{when}", "  host      : n1"]
        lines += [f"  rank      : {rank} (local_rank: 0)", f"  exitcode  : {status} (pid: {100 + rank})"]
        lines += ["  error_file: <N/A>", "  traceback : To enable traceback see: https://pytorch.org/docs"]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("words\n" + _report(("03", 1, 9)), (1, 9)),
        (_report(("05", 0, 1)) + "words\n" + _report(("03", 3, 2)), (3, 2)),
        (_report(("05", 0, 1), ("05", 1, 1)) + _report(("05", 2, -9)), (2, -9)),
        (_report(("03", 0, -15)) + _report(("05", 1, 1)), (1, 1)),
        ("no report\n", None),
    ],
)
def test_the_rank_that_failed_first(tmp_path, log, expected):
    path = tmp_path / "trainer.log"
    path.write_text(log)
    assert first_failure(path) == expected


def test_without_a_log_nothing_is_known(tmp_path):
    assert first_failure(tmp_path / "trainer.log") is None and last_lines(tmp_path / "trainer.log", 3) == []


@pytest.mark.parametrize("rank", [0, 1, 12345])
def test_each_rank_writes_into_its_own_file(tmp_path, rank):
    logs = tmp_path / "a b'c"
    logs.mkdir()
    command = as_rank(logs, ["/bin/sh", "-c", "echo out; echo err >&2; exit 3"])
    done = subprocess.run(["env", f"RANK={rank}", *command], capture_output=True, text=True)
    assert done.returncode == 3
    if rank == 0:
        assert (done.stdout, done.stderr) == ("out\n", "err\n") and not list(logs.iterdir())
        return
    path = log_of_rank(logs / "trainer.log", rank)
    assert done.stdout == done.stderr == "" and last_lines(path, 5) == ["out", "err"]
    assert path.name == f"rank-{rank:04d}.log"
    remove_rank_logs(logs / "trainer.log")
    assert not list(logs.iterdir())
