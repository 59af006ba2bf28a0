"""env.example names every variable that the code and compose.yaml read."""

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.helpers.compose_file import INFRA, read_env_file, variables_of

REPO = Path(__file__).parents[2]
PACKAGES = ("dataset_builders", "flows", "stages", "trainer")
# Set by torchrun, SLURM, Kubernetes or Prefect's worker for the processes that they start; nobody sets them by hand.
OF_A_LAUNCHER = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|SLURM_.*|PREFECT__.*)$"
)
# Variables of the shell, the terminal and the GPU driver.
OF_THE_SYSTEM = {"PATH", "HOME", "USER", "COLUMNS", "NO_COLOR", "TERM", "TMPDIR", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"}


def constants_of(tree: ast.Module) -> dict[str, str]:
    """Return the names of a module that are constants with a text as their value."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    return found


def reads_of(tree: ast.Module, known: dict[str, str]) -> set[str]:
    """Return the variables that are read or set through os.environ or os.getenv, by a text or by a text constant."""
    found = set()
    for node in ast.walk(tree):
        key = None
        if isinstance(node, ast.Call) and re.search(
            r"environ(ment)?\.(get|setdefault|pop)$|getenv$", ast.unparse(node.func)
        ):
            key = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(("environ", "environment")):
            key = node.slice
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
            key = node.left
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            found.add(key.value)
        elif key is not None and (name := ast.unparse(key).split(".")[-1]) in known:
            found.add(known[name])
    return found


@functools.cache
def all_reads() -> dict[str, str]:
    """Return variable -> a file that reads it."""
    trees = {path: ast.parse(path.read_text()) for name in PACKAGES for path in sorted((REPO / name).rglob("*.py"))}
    known: dict[str, str] = {}
    for tree in trees.values():
        known |= constants_of(tree)
    return {name: str(path.relative_to(REPO)) for path, tree in trees.items() for name in reads_of(tree, known)}


@pytest.mark.full
def test_the_check_sees_what_it_looks_for():
    code = (
        "A = 'ONE'\nos.environ.get(A)\nos.environ['TWO']\n'THREE' in os.environ\nos.getenv('FOUR')\nos.environ.get(x)"
    )
    tree = ast.parse(code)
    assert reads_of(tree, constants_of(tree)) == {"ONE", "TWO", "THREE", "FOUR"}
    assert {"ATHANOR_CACHE_DIR", "MLFLOW_TRACKING_URI", "ATHANOR_ROOT"} <= set(all_reads())


@pytest.mark.full
def test_every_variable_of_the_code_is_named():
    named = read_env_file(INFRA / "env.example")
    missing = {
        name: where
        for name, where in all_reads().items()
        if name not in named and name not in OF_THE_SYSTEM and not OF_A_LAUNCHER.match(name)
    }
    # Prefect's own logging variables, whose defaults are in the code
    missing = {name: where for name, where in missing.items() if not name.startswith("PREFECT_LOGGING_")}
    assert not missing, f"infra/env.example has no line for {missing}"


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_every_variable_of_compose_is_named(name):
    missing = set(variables_of((INFRA / name).read_text())) - set(read_env_file(INFRA / "env.example"))
    assert not missing, f"infra/env.example has no line for {missing}"


def test_every_variable_has_a_word_and_stands_once():
    lines = (INFRA / "env.example").read_text().splitlines()
    names = [match[1] for line in lines if (match := re.match(r"#?([A-Z][A-Z0-9_]*)=", line))]
    assert len(names) == len(set(names))
    assert len([line for line in lines if line.startswith("# ")]) > len(names) / 2
