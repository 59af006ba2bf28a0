"""The GPUs and packages of this host, from a fake driver whose answer the test sets, and the line
that `plan` prints."""

import os
from pathlib import Path

import pytest

from dataset_builders.errors import InputError
from flows.cli.main import main
from flows.pipeline import host
from flows.pipeline.plan import check_model, modules_line
from flows.pipeline.recipe import load_recipe
from trainer.contract.modules import Host


@pytest.fixture
def driver(tmp_path: Path, monkeypatch):
    """Return a function that writes this test's nvidia-smi. torch is a GPU build, and no GPU is hidden."""
    monkeypatch.setattr(host, "installed_version", lambda name: {"torch": "2.11.0+cu130"}.get(name, ""))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def write(lines: str, status: int = 0) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '%s' '{lines}'\nexit {status}\n")
        program.chmod(0o755)

    host.this_host.cache_clear()
    yield write
    host.this_host.cache_clear()


@pytest.mark.parametrize(
    ("lines", "status", "found"),
    [
        ("NVIDIA H200, 9.0\nNVIDIA H200, 9.0\n", 0, Host("NVIDIA H200", (9, 0))),
        ("NVIDIA A100-SXM4-80GB, 8.0\n", 0, Host("NVIDIA A100-SXM4-80GB", (8, 0))),
        ("NVIDIA X, [N/A]\n", 0, Host("NVIDIA X", None)),
        ("No devices were found\n", 6, Host()),
        ("", 0, Host()),
    ],
)
def test_the_drivers_word(lines, status, found, driver):
    driver(lines, status)
    assert host.this_host() == found


def test_a_gpu_that_torch_cannot_use_is_none(driver, monkeypatch):
    driver("NVIDIA H200, 9.0\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert host.this_host() == Host()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(host, "installed_version", lambda name: "2.13.0+cpu")
    host.this_host.cache_clear()
    assert host.this_host() == Host()


def test_where_another_host_trains_this_one_is_not_asked(driver):
    driver("")
    settings = ["train.precision=float8"]
    with pytest.raises(InputError, match="float8 needs a GPU"):
        check_model(load_recipe(overrides=settings).config)
    cluster = "execution.cluster={launcher: slurm, job_file: gpu.sbatch}"
    check_model(load_recipe(overrides=[*settings, cluster]).config)


def test_plan_names_the_modules(driver, tmp_path, capsys):
    driver("NVIDIA A100, 8.0\n")
    line = modules_line(load_recipe().config)
    assert line.startswith("training will use plain torch without our kernels, on NVIDIA A100; they need")
    assert main(["plan", "--root", str(tmp_path / "root")]) == 0
    assert line in capsys.readouterr().out.splitlines()
