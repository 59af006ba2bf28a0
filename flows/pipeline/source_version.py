"""The commit of this code, if it runs from a git checkout."""

import subprocess
from pathlib import Path


def source_version(directory: Path = Path(__file__).parent) -> dict[str, str]:
    """Return {"commit": 40 hex digits, "dirty": "true" | "false"}; {} outside a checkout or without git."""
    commit = _git(directory, "rev-parse", "HEAD")
    if commit is None:
        return {}
    status = _git(directory, "status", "--porcelain", "--untracked-files=normal")
    return {"commit": commit, "dirty": "true" if status else "false"}


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
