"""Record the commit at which all tests passed: `make test-full` calls this after its last test.

python -m tests.tiers.passed
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FULL_PASS = ROOT / "tests" / "full_pass.json"


def git(*arguments: str) -> str:
    """Return the output of a git command.

    Raises:
        subprocess.CalledProcessError: git failed, or this is not a checkout.
    """
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def read_full_pass() -> str:
    """Return the newest commit at which all tests passed."""
    return json.loads(FULL_PASS.read_text())["commit"]


def main() -> int:
    """Record HEAD, unless files differ from it."""
    changed = git("status", "--porcelain", "--untracked-files=no").replace(" M tests/durations.json", "").strip()
    if changed:
        print(f"not recorded in {FULL_PASS.relative_to(ROOT)}: these files differ from HEAD:\n{changed}")
        return 0
    commit = {"commit": git("rev-parse", "HEAD"), "date": git("log", "-1", "--format=%cs")}
    FULL_PASS.write_text(json.dumps(commit) + "\n")
    print(f"all tests of {commit['commit'][:10]} passed; recorded in {FULL_PASS.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
