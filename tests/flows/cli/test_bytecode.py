"""The user's cache keeps compiled modules if they are kept nowhere else, and only then."""

import os
import subprocess
import sys

import pytest

WHERE = "from flows.cli.main import keep_bytecode; keep_bytecode(); import sys; print(sys.pycache_prefix)"
WITNESS = "import torch, os; print(os.environ['PYTHONPYCACHEPREFIX'], torch.__cached__)"


@pytest.fixture
def place(tmp_path):
    """Make a package named torch without compiled modules."""
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("number = 1\n")
    return tmp_path


def run(place, code, **environment):
    known = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    known |= {"PYTHONPATH": f"{place / 'site'}:{os.getcwd()}", "HOME": str(place), **environment}
    return subprocess.run([sys.executable, "-c", code], env=known, capture_output=True, text=True, check=True).stdout


def test_an_image_that_may_write_none_keeps_them_in_the_users_cache(place):
    nested = f"{WHERE}; import subprocess; subprocess.run([sys.executable, '-c', {WITNESS!r}])"
    run(place, nested, PYTHONDONTWRITEBYTECODE="1")
    assert not list((place / "site").rglob("*.pyc"))
    assert list((place / ".cache/athanor/bytecode").rglob("torch/__init__*.pyc")), "its child keeps them too"


@pytest.mark.parametrize("environment", [{}, {"PYTHONPYCACHEPREFIX": "/else"}])
def test_where_they_are_kept_nothing_changes(place, environment):
    assert run(place, WHERE, **environment).strip() == environment.get("PYTHONPYCACHEPREFIX", "None")


def test_what_was_compiled_before_is_used(place):
    run(place, "import torch")
    assert run(place, WHERE, PYTHONDONTWRITEBYTECODE="1").strip() == "None"
