"""`athanor plan --launcher ...`: it shows byte for byte what a run would then submit."""

import argparse
import sys
from pathlib import Path

import pytest

from dataset_builders.errors import InputError
from flows.cli import plan
from flows.cli.check import open_plan
from flows.pipeline.plan import Plan
from flows.pipeline.recipe import load_recipe
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.shared.launchers.job import LAUNCHERS, JobFailed
from stages.shared.launchers.slurm import SBATCH_FILE
from stages.train import stage as train
from tests.helpers.compose_file import INFRA
from tests.helpers.small_run import SMALL

OVERRIDES = [f"{name}={value}" for name, value in SMALL.items()]
HEADER = f"execution.cluster.job_file={INFRA}/slurm/header.sbatch"


@pytest.fixture(scope="module")
def with_data(tmp_path_factory) -> tuple[Path, dict]:
    """Make a root whose data stages are finished, and return their artifacts."""
    root, found = tmp_path_factory.mktemp("root"), {}
    for step in Plan.open(load_recipe("embedded", OVERRIDES), root).steps:
        if step.name == "train":
            return root, found
        step.artifact = run_stage(step.stage, step.config, step.read(), root, StageResources()).artifact
        found[step.name] = step.artifact
    raise AssertionError


def printed(capsys, root: Path, launcher: str | None, *overrides: str) -> list[str]:
    """Return what the plan prints, divided at its rulers."""
    args = argparse.Namespace(
        gpu_memory=None, recipe="embedded", overrides=[*OVERRIDES, *overrides], root=root, launcher=launcher
    )
    open_plan(args)
    assert plan.plan_command(args) == 0
    return capsys.readouterr().out.split(plan.RULER + "\n")


def shown(capsys, root: Path, launcher: str, *overrides: str) -> str:
    """Return the text between the two rulers of the plan."""
    return printed(capsys, root, launcher, *overrides)[1]


def test_what_is_shown_for_slurm_is_what_sbatch_gets(with_data, capsys, tmp_path, monkeypatch):
    root, found = with_data
    text = shown(capsys, root, "slurm", HEADER)
    submitted = tmp_path / "submitted"
    (tmp_path / "sbatch").write_text(f'#!/bin/sh\ncp "$3" {submitted}; echo 7\n')
    for name in ("squeue", "scancel", "scontrol", "sacct"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("stages.shared.launchers.slurm.VISIBLE_SECONDS", 0.1)
    monkeypatch.setattr("stages.shared.launchers.scheduled.LOOK_SECONDS", 0.1)
    config = load_recipe("embedded", [*OVERRIDES, HEADER, "execution.cluster.launcher=slurm"]).config
    inputs = {"model": found["embedded_model"], "tokenized": found["tokenize"], "bins": found["plan_bins"]}
    with pytest.raises(JobFailed, match="SLURM job 7 is gone"):
        run_stage(train.STAGE, config.train, inputs, root, StageResources(cluster=config.execution.cluster))
    assert submitted.read_bytes() == text.encode()
    (kept,) = root.glob(f"scratch/train-*/{SBATCH_FILE}")
    assert kept.read_bytes() == text.encode() and str(kept) in text


def test_torchrun_is_a_command_and_shown_when_asked_for(with_data, capsys, monkeypatch):
    monkeypatch.setitem(LAUNCHERS, "torchrun", "stages.shared.launchers.torchrun:TorchrunLauncher")
    root, _ = with_data
    text = shown(capsys, root, "torchrun", "execution.cluster.processes=2", "train.global_batch_size=2")
    assert "-m torch.distributed.run --standalone --max-restarts=0" in text and f"{root}/scratch/train-" in text
    text = shown(capsys, root, "torchrun", "execution.cluster.processes=1")
    assert f"{sys.executable} -m trainer {root}/scratch/train-" in text
    assert len(printed(capsys, root, None)) == 1


def test_kubernetes_shows_the_manifest(with_data, capsys, tmp_path):
    root, _ = with_data
    text = (INFRA / "kubernetes" / "trainjob.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text.replace("mountPath: /athanor", f"mountPath: {root}"))
    text = shown(capsys, root, "kubernetes", f"execution.cluster.job_file={tmp_path}/job.yaml")
    assert "kind: TrainJob" in text and f"{root}/scratch/train-" in text


def test_without_a_header_the_least_one_is_told(tmp_path, capsys):
    with pytest.raises(
        InputError, match=r"launcher=slurm needs job_file.*at least the lines `#SBATCH --partition=NAME`"
    ):
        shown(capsys, tmp_path, "slurm")


def test_before_the_data_is_made_the_unknown_part_of_a_path_is_named(capsys, tmp_path):
    text = shown(capsys, tmp_path, "slurm", HEADER)
    assert f"readonly run_dir={tmp_path}/scratch/train-FINGERPRINT\n" in text
    assert not list(tmp_path.iterdir())


def test_the_other_jobs_are_named(tmp_path, capsys):
    others = printed(capsys, tmp_path, "slurm", HEADER)[2].splitlines()
    answering = f"the same, with -m stages.answer.worker {tmp_path}/scratch/answer-FINGERPRINT/job/job.json"
    assert others == [
        f"For export the same, with -m trainer {tmp_path}/scratch/export-FINGERPRINT/job/run.json",
        f"For answer {answering}",
        f"For answer_base {answering}",
    ]
    # With torchrun of one process, what is not trained runs in the flow's own.
    assert "stages.answer.worker" not in "".join(printed(capsys, tmp_path, "torchrun", HEADER))


def test_a_launcher_that_cannot_take_the_layout_is_refused(tmp_path, capsys):
    with pytest.raises(InputError, match="nodes=2 needs a launcher for several hosts"):
        shown(capsys, tmp_path, "torchrun", "execution.cluster.nodes=2", "execution.cluster.processes=2")
