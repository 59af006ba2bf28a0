"""Every install line of the repository: athanor is installed from its checkout in one spelling,
other projects by name."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from dataset_builders.storage.store import _EXTRAS

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
_OF_A_STORE = "{_EXTRAS[protocol]}"  # in the message of dataset_builders/storage/store.py
# Names of the distributions that are installed in addition to athanor.
OTHERS = {"megatron-energon", "lmms-eval", "decord", "torchvision", "transformers", "vllm"}
NOT_OURS = {".git", ".venv", "athanor-root", "__pycache__", ".pytest_cache", ".ruff_cache", "build", "mlruns"}
_LINE = re.compile(r"(?:\bpip3? install|\$\(PIP\))\s+(?P<rest>[^\n`|&\\)]+)")
_OPTION = re.compile(r"(?:--quiet|--no-deps|--no-build-isolation|-[cr] (?:\$\(.*|\S+)|--target \S+|--index-url \S+)\s*")
_CHECKOUT = re.compile(r"-e (?:\.(?![\w\[])|'\.\[(?P<extras>[^']+)\]')")
_IN_AN_IMAGE = re.compile(r"'\.\[(?P<extras>[^']+)\]'")  # nobody edits the sources in an image
_NAME = re.compile(r"[\"']?([A-Za-z][\w-]*)")


def install_lines() -> list[tuple[str, str]]:
    """Return (file and line number, the words after `pip install`) for all files except this one."""
    found = []
    for folder, folders, names in os.walk(REPO):
        folders[:] = [name for name in folders if name not in NOT_OURS and not name.endswith(".egg-info")]
        for path in (Path(folder, name) for name in names):
            if path == Path(__file__) or path.suffix in (".png", ".pyc", ".parquet"):
                continue
            text = path.read_text(encoding="utf-8", errors="replace").replace(r"\[", "[").replace(r"\]", "]")
            for match in _LINE.finditer(text):
                where = f"{path.relative_to(REPO)}:{text.count(chr(10), 0, match.start()) + 1}"
                found.append((where, match["rest"].strip()))
    return found


def why_wrong(where: str, line: str) -> str | None:
    """Return why an install line is wrong; None for an allowed line."""
    line = _OPTION.sub("", line).strip()
    match = _CHECKOUT.match(line) or (_IN_AN_IMAGE.match(line) if where.startswith("infra/Dockerfile.") else None)
    if match:
        named = (match.groupdict().get("extras") or "").split(",")
        unknown = [extra for extra in named if extra and extra not in (*EXTRAS, _OF_A_STORE)]
        return f"pyproject.toml has no extra {unknown[0]}" if unknown else None
    name = _NAME.match(line)
    return f"{name[1] if name else line} is neither this checkout nor known" if line and not _is_other(name) else None


def _is_other(name: re.Match | None) -> bool:
    return name is not None and name[1] in OTHERS


def test_every_install_line_has_the_one_spelling():
    lines = install_lines()
    files = {where.partition(":")[0] for where, _ in lines}
    assert {"docs/operations.md", "Makefile", "infra/Dockerfile.train", "flows/cli/doctor.py"} <= files
    assert {where: why for where, line in lines if (why := why_wrong(where, line))} == {}
    assert set(_EXTRAS.values()) <= set(EXTRAS)


@pytest.mark.parametrize("line", ["athanor", "'athanor[s3]'", "athanor-vlm", "-e '.[s4]'", "'.[s3]'", "-e .[s3]", "."])
def test_other_spellings_are_found(line):
    assert why_wrong("README.md:1", line) and why_wrong("README.md:1", f"-c constraints.txt {line}")


def test_the_distributions_name_is_asked_for_as_declared():
    names = {
        name
        for folder in ("flows", "stages", "dataset_builders", "trainer", "tests")
        for path in (REPO / folder).rglob("*.py")
        for name in re.findall(r"metadata\.\w+\(\"(athanor[\w-]*)\"\)", path.read_text())
    }
    dev = next(line for line in PROJECT["optional-dependencies"]["dev"] if line.startswith("athanor"))
    assert names == {PROJECT["name"]} == {dev.partition("[")[0]}
