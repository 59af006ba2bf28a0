"""`make gpu`: its checks, output and commands. And every file that names the GPU packages names the same versions."""

import os
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from flows.cli import doctor
from infra import gpu_environment
from tests.helpers.compose_file import INFRA

REPO = INFRA.parent
PINS = gpu_environment.read_pins(REPO / "constraints-gpu.txt")
GPU_RESULTS = [
    path
    for path in sorted((REPO / "tests/bench/results").glob("*.md"))
    if re.search(r"^Card: .*H[12]00", path.read_text(), re.MULTILINE)
]
# A package and its version in a text, possibly with a line break between them.
_VERSION = re.compile(r"\b(torch|triton|megatron-core|transformers|transformer[-_ ]engine)\s+(\d+(?:\.\d+)+)", re.I)


def add_program(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make a machine with an NVIDIA GPU and a compiler. Its programs are in `bin`, and PATH has only this directory."""
    programs = tmp_path / "bin"
    add_program(programs, "nvidia-smi", "echo 'NVIDIA H200, 580.159.04'")
    add_program(programs, "c++", "exit 0")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    free = tmp_path / "free"  # bytes of disk
    free.write_text("1e12")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(gpu_environment.sys, "executable", str(tmp_path / "none"))  # no package is really installed
    monkeypatch.setattr(gpu_environment.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(
        gpu_environment.shutil, "disk_usage", lambda path: SimpleNamespace(free=float(free.read_text()))
    )
    return tmp_path


def run(*arguments: str, venv: Path) -> int:
    return gpu_environment.main([*arguments, "--venv", str(venv)])


NO_GPU = "nvidia-smi lists no NVIDIA GPU on this machine; `make run` needs none"
# What a machine lacks -> (how it comes to lack it, the line that says so)
LACKS = {
    "nvidia-smi": (lambda machine: (machine / "bin" / "nvidia-smi").unlink(), NO_GPU),
    "driver": (lambda machine: add_program(machine / "bin", "nvidia-smi", "exit 9"), NO_GPU),
    "GPU": (lambda machine: add_program(machine / "bin", "nvidia-smi", "echo"), NO_GPU),
    "new driver": (
        lambda machine: add_program(machine / "bin", "nvidia-smi", "echo 'NVIDIA A100, 570.1'"),
        r"missing a driver for CUDA 13 \(570\.1 is installed\): update it to 580 or newer",
    ),
    "compiler": (
        lambda machine: (machine / "bin" / "c++").unlink(),
        r"missing a C\+\+ compiler \(c\+\+\): apt-get install g\+\+",
    ),
    "headers": (
        lambda machine: (machine / "include" / "Python.h").unlink(),
        r"missing Python's headers \(.*/include/Python.h\): apt-get install python3\.1\d-dev",
    ),
    "disk": (
        lambda machine: (machine / "free").write_text("3e9"),
        r"missing 10 GB of disk for .*venv \(3\.0 GB are free\)",
    ),
}


@pytest.mark.parametrize("part", LACKS)
def test_each_missing_part_is_named_with_its_way_out(machine, capsys, part):
    take_away, way_out = LACKS[part]
    take_away(machine)
    assert run(venv=machine / "venv") == 2 and not (machine / "venv").exists()
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and re.search(way_out, err)


def test_a_dry_run_prints_the_cost_and_the_commands(machine, monkeypatch, capsys):
    monkeypatch.setenv("MAX_JOBS", "7")
    assert run("--dry-run", venv=machine / "venv") == 0 and not (machine / "venv").exists()
    out = capsys.readouterr().out
    assert "NVIDIA H200" in out and "torch==2.11.0" in out and "10 GB" in out and "7 processes" in out
    assert f"-c {machine}/venv/constraints.txt --no-build-isolation -e '.[gpu]'" in out
    assert run("--dry-run", "--image", venv=machine / "venv") == 0
    assert "--no-build-isolation 'transformer-engine[pytorch]'" in capsys.readouterr().out


def test_as_many_compilers_as_cores_and_memory_allow():
    assert [gpu_environment.max_jobs(16, free) for free in (1.0, 9.0, 500.0)] == [1, 4, 16]


def fake_environment(root: Path, script: str) -> Path:
    """Make an environment whose python runs the script and which has the headers of torch. Return its directory."""
    add_program(root / "venv" / "bin", "python", script)
    version = gpu_environment.sys.version_info
    site = root / "venv" / "lib" / f"python{version.major}.{version.minor}" / "site-packages"
    for name in ("cu13/bin/nvcc", *gpu_environment.HEADERS):
        (site / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (site / "nvidia" / name).touch()
    return root / "venv"


def test_the_build_gets_the_pins_and_finds_the_headers(machine):
    venv = fake_environment(machine, f'echo "$CUDA_HOME|$CPLUS_INCLUDE_PATH|$PATH|$*" >> {machine}/log')
    assert run(venv=venv) == 0 and (venv / ".installed").exists()
    calls = [line.split("|") for line in (machine / "log").read_text().splitlines()]
    assert [re.sub(r".* (?=torch )|.*constraints.txt ", "", call[3])[:20] for call in calls] == [
        "torch cuda-toolkit[c",
        "--no-build-isolation",
        "-c import torch, tra",
    ]
    cuda_home, includes, path, _ = calls[1]
    assert (Path(cuda_home) / "include/cuda_runtime.h").exists() and path.startswith(f"{venv}/bin{os.pathsep}")
    for header in ("cudnn.h", "nccl.h", "nv/target"):
        assert any((Path(folder) / header).exists() for folder in includes.split(os.pathsep)), header
    pins = gpu_environment.read_pins(venv / "constraints.txt")
    assert pins["torch"] == "torch==2.11.0" and pins["prefect"] == "prefect==3.8.8"


def test_a_missing_header_or_a_failed_command_ends_it_without_the_mark(machine, capsys):
    venv = fake_environment(machine, f"echo run >> {machine}/log")
    next(venv.rglob("cudnn.h")).unlink()
    assert run(venv=venv) == 2 and "nvidia/cudnn/include/cudnn.h: torch came from an index" in capsys.readouterr().err
    assert (machine / "log").read_text().split() == ["run"]
    assert run(venv=fake_environment(machine, "exit 1")) == 1 and "failed at" in capsys.readouterr().err
    assert not (venv / ".installed").exists()


def test_the_stack_fits_the_declared_requirements():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    named = {gpu_environment.normalized(r.name): r.specifier for r in map(Requirement, declared)}
    pinned = {name: pin.partition("==")[2] for name, pin in PINS.items()}
    assert {"torch", "megatron-core", "transformers", "transformer-engine"} <= set(named) & set(pinned)
    assert [name for name in set(named) & set(pinned) if not named[name].contains(pinned[name])] == []
    engine = {pinned[name] for name in pinned if name.startswith("transformer-engine")}
    assert engine == {pinned["transformer-engine"]}


def test_the_image_gets_the_same_stack():
    text = (INFRA / "Dockerfile.train").read_text()
    assert "RUN python infra/gpu_environment.py --image --venv /opt/venv" in text
    assert "-c /opt/venv/constraints.txt '.[gpu,s3,dask]'" in text
    assert not _VERSION.findall(text)  # the versions are only in constraints-gpu.txt


def test_doctor_reads_the_same_pins():
    for name in ("constraints.txt", "constraints-gpu.txt"):
        pins = gpu_environment.read_pins(REPO / name)
        assert doctor._read_pins(REPO / name) == {name: pin.partition("==")[2] for name, pin in pins.items()}


def test_every_gpu_result_is_of_the_pinned_stack_or_says_so():
    assert len(GPU_RESULTS) >= 12
    for path in GPU_RESULTS:
        text = path.read_text()
        found = _VERSION.findall(text)
        assert any(name == "torch" for name, _ in found), f"{path.name} names no version of torch"
        for match in _VERSION.finditer(text):
            pin = PINS[gpu_environment.normalized(match[1].replace(" ", "-"))].partition("==")[2]
            is_pinned = (pin + ".").startswith(match[2] + ".")
            assert is_pinned or "not the pinned" in text[match.end() : match.end() + 40], f"{path.name}: {match[0]}"
