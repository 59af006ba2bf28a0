"""The job files of infra/ are accepted by the launchers, for two nodes of eight GPUs."""

from pathlib import Path

import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import Job, make_launcher
from tests.helpers.compose_file import INFRA

RUN_DIR = "/athanor/scratch/train-5f1c2d3e4a5b6c7d"
JOB = Job(RUN_DIR, ("-m", "trainer", f"{RUN_DIR}/run.json"), Path(RUN_DIR, "logs/trainer.log"))


def submitted(launcher: str, file: str) -> str:
    return make_launcher(ClusterConfig(launcher=launcher, job_file=INFRA / file, nodes=2, processes=16)).plan(JOB)


def test_the_header_is_accepted_and_stands_first():
    lines = submitted("slurm", "slurm/header.sbatch").splitlines()
    asked = [line for line in (INFRA / "slurm" / "header.sbatch").read_text().splitlines() if "#SBATCH" in line]
    assert [line for line in lines if line.startswith("#SBATCH")][: len(asked)] == asked and len(asked) > 3


def test_the_trainjob_is_accepted_and_known_to_kubeflow():
    trainjob = yaml.safe_load(submitted("kubernetes", "kubernetes/trainjob.yaml"))
    # The models ignore unknown fields, so a field that they leave out is misspelt.
    assert TrainerV1alpha1TrainJob.from_dict(trainjob).to_dict() == trainjob
