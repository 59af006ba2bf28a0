"""The packages that the Makefile installs for each command, as `make --dry-run` prints them."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    """Copy the files that decide what is installed, and make an environment without any packages."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-gpu.txt"):
        shutil.copy(REPO / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    return tmp_path


def installs(checkout: Path, target: str) -> list[str]:
    """Return the arguments of every installation, in order. `make gpu` counts as one installation."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", target]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=True)
    return [found[1].strip() for found in re.finditer(r"(?:pip install --quiet|python (?=infra/)) ?(.*)", done.stdout)]


def test_a_run_needs_no_tools_of_the_tests(checkout):
    for target in ("run", "doctor"):
        assert installs(checkout, target) == ["-c constraints.txt -e ."]
    for target in ("test", "lint"):
        assert installs(checkout, target) == ["-c constraints.txt -e '.[dev]'"]


def test_nothing_is_installed_twice(checkout):
    for name in (".installed", ".installed-dev"):
        (checkout / ".venv" / name).touch()
    assert installs(checkout, "run") == installs(checkout, "test") == []


def test_the_stack_of_a_gpu_stays(checkout):
    (checkout / ".venv" / "constraints.txt").touch()  # `make gpu` leaves it in this state
    assert installs(checkout, "run") == ["infra/gpu_environment.py"]
    assert installs(checkout, "test") == ["infra/gpu_environment.py", "-c .venv/constraints.txt -e '.[dev]'"]
