"""Kill -9 a stage at every kind of moment, run it again, and compare the artifact with that of an undisturbed run.

Children are forked from a fresh process that has imported everything and started no thread, so that many moments cost
little. A moment is a call of os.replace, os.rename, os.unlink or ShardWriter.write.
"""

import functools
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from dataset_builders.contracts.shard_io import ShardWriter
from tests.helpers.trees import tree_digest


def kill_and_rerun(run: Callable[[Path], Path], root: Path, every: int) -> dict[str, object]:
    """Kill `run(root)` at the moments 1, 1 + every, ... until it finishes, and run it again after each kill.

    Args:
        run: function that makes an artifact below the given root and returns its directory.

    Returns:
        values for JSON: "kills", and "differing": moment -> names of files that differ from the undisturbed run's.
    """
    expected = tree_digest(run(root / "undisturbed"))
    assert expected
    differing: dict[int, list[str]] = {}
    moment, kills = 1, 0
    while True:
        target = root / f"killed-{moment}"
        if not _in_child(functools.partial(_run_until, run, target, moment)):
            return {"kills": kills, "differing": differing}
        kills += 1
        assert not _in_child(functools.partial(run, target)), "the second try was killed or failed"
        got = tree_digest(run(target))
        names = sorted(n for n in expected.keys() | got.keys() if expected.get(n) != got.get(n))
        if names:
            differing[moment] = names
        moment += every


def kill_at_random(run: Callable[[Path], Path], root: Path, kills: int, seed: int) -> int:
    """Kill `run(root)` a number of times at random moments, one try after the other in the same root. Then let it
    finish.

    Returns:
        the number of kills.
    """
    count_file = root.with_name(f"{root.name}-moments")
    assert not _in_child(functools.partial(_count_moments, run, root.with_name(f"{root.name}-counted"), count_file))
    # A try resumes where the previous one was killed, so each kill is within its share of the moments before the end.
    share, rng = int(count_file.read_text()) // (kills + 1), random.Random(seed)
    killed = sum(_in_child(functools.partial(_run_until, run, root, rng.randint(1, share))) for _ in range(kills))
    assert not _in_child(functools.partial(run, root)), "the last try was killed"
    return killed


def _count_moments(run: Callable[[Path], Path], root: Path, out: Path) -> None:
    out.write_text(str(_run_until(run, root, 0)))


def _run_until(run: Callable[[Path], Path], root: Path, moment: int) -> int:
    """Run, and be killed at the given moment (counted from 1; 0 means never). Return the number of moments."""
    count = 0

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("replace", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    ShardWriter.write = counted(ShardWriter.write)
    run(root)
    return count


def _in_child(work: Callable[[], object]) -> bool:
    """Run in a forked child, and return whether the child was killed."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed by itself"
    return False


def print_result(result: dict[str, object]) -> None:
    """Print the last line of a script's output, for the test that started the script."""
    print(json.dumps(result))
