"""Break the code on purpose, one break at a time, and report the breaks that no core test detects: `make breaks`.

    python -m tests.breaks [NAME ...]

Each break is applied in its own checkout of HEAD. First the tests of its `Seen by:` line run. If none of them fails,
all core tests that the broken file can reach run. A break that no test detects means that the core lost a guarantee,
and the command exits with 1.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.tiers.changed import git, tests_for

FOLDER = Path(__file__).parent
SEEN_BY = "Seen by: "
FAILED = 1  # pytest's exit status when a test failed


@dataclass(frozen=True, slots=True)
class Break:
    """A deliberate break.

    Attributes:
        says: description of what it breaks.
        seen_by: pytest's arguments for the tests that detect it.
        files: the files that it changes.
    """

    path: Path
    says: str
    seen_by: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def read_breaks() -> list[Break]:
    """Return all breaks by name.

    Raises:
        ValueError: a patch does not say what it breaks, or which tests detect it.
    """
    return [_read(path) for path in sorted(FOLDER.glob("*.patch"))]


def _read(path: Path) -> Break:
    lines = path.read_text().splitlines()
    head = lines[: next(i for i, line in enumerate(lines) if line.startswith(("diff ", "--- ")))]
    seen_by = [line.removeprefix(SEEN_BY) for line in head if line.startswith(SEEN_BY)]
    says = " ".join(line for line in head if line.strip() and not line.startswith(SEEN_BY))
    if not says or len(seen_by) != 1:
        raise ValueError(f"{path.name} needs a line that says what it breaks, and one line '{SEEN_BY}TESTS'")
    files = [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]
    return Break(path, says, tuple(shlex.split(seen_by[0])), tuple(files))


def is_seen(broken: Break, checkout: Path) -> bool:
    """Whether a core test fails in a checkout that has the break."""
    if _fails(checkout, *broken.seen_by):
        return True
    print(f"  {broken.name}: {' '.join(broken.seen_by)} does not see it; trying all core tests that it reaches")
    reached = tests_for(broken.files).keys() - {"tests/test_tiers.py"}  # the patch would not apply twice there
    return _fails(checkout, *sorted(reached))


def _fails(checkout: Path, *arguments: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not full", *arguments]
    env = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
    if done.returncode not in (0, FAILED):
        raise RuntimeError(f"pytest {shlex.join(arguments)} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return done.returncode == FAILED


def main(names: list[str]) -> int:
    """Try the named breaks, or all breaks."""
    breaks = [broken for broken in read_breaks() if not names or broken.name in names]
    began, unseen = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="athanor-breaks-") as folder:
        checkout = Path(folder) / "checkout"
        git("worktree", "add", "--quiet", "--detach", str(checkout), "HEAD")
        try:
            for broken in breaks:
                start = time.monotonic()
                subprocess.run(("git", "apply", str(broken.path)), cwd=checkout, check=True)
                seen = is_seen(broken, checkout)
                subprocess.run(("git", "checkout", "--quiet", "."), cwd=checkout, check=True)
                unseen += [] if seen else [broken.name]
                state = "seen" if seen else "NOT SEEN"
                print(f"{state:8}  {time.monotonic() - start:5.0f} s  {broken.name}: {broken.says}", flush=True)
        finally:
            git("worktree", "remove", "--force", str(checkout))
    print(f"{len(breaks) - len(unseen)} of {len(breaks)} breaks seen, {time.monotonic() - began:.0f} s in all")
    print("".join(f"no core test sees {name}\n" for name in unseen), end="")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
