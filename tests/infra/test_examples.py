"""The examples of infra/ are equal to what the launchers render. `python -m tests.infra.test_examples` writes them
again."""

from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from stages.launchers.config import ClusterConfig
from stages.launchers.job import Job, make_launcher
from tests.helpers.compose_file import INFRA

RUN_DIR = "/athanor/scratch/train-5f1c2d3e4a5b6c7d"
JOB = Job(RUN_DIR, ("-m", "trainer", f"{RUN_DIR}/run.json"), Path(RUN_DIR, "logs/trainer.log"))
# Two nodes of eight GPUs: the values of execution.cluster in a recipe.
EXAMPLES = {
    "slurm/job.sbatch": {
        "launcher": "slurm",
        "nodes": 2,
        "processes": 16,
        "slurm": {
            "partition": "gpu",
            "account": "research",
            "time_limit": "2-00:00:00",
            "gpus_per_node": 8,
            "cpus_per_task": 64,
            "python": "/opt/athanor/.venv/bin/python",
            "workdir": "/opt/athanor",
        },
    },
    "kubernetes/trainjob.yaml": {
        "launcher": "kubernetes",
        "nodes": 2,
        "processes": 16,
        "kubernetes": {
            "namespace": "research",
            "image": "registry.example/athanor-train:0.1.0",
            "cpus_per_node": 64,
            "memory_per_node": "1024Gi",
            "shared_memory": "64Gi",
            "claim": "athanor-root",
            "secret": "athanor-s3",
            "run_as_user": 10001,
            "labels": {"kueue.x-k8s.io/queue-name": "research"},
        },
    },
}


def render(name: str) -> str:
    """Return the bytes of an example."""
    return make_launcher(ClusterConfig.model_validate(EXAMPLES[name])).plan(JOB)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_is_what_is_submitted(name):
    assert (INFRA / name).read_text() == render(name), "write it anew: python -m tests.infra.test_examples"


def test_the_trainjob_is_what_kubeflow_knows():
    trainjob = yaml.safe_load((INFRA / "kubernetes" / "trainjob.yaml").read_text())
    assert TrainerV1alpha1TrainJob.from_dict(trainjob).to_dict() == trainjob


if __name__ == "__main__":
    for example in EXAMPLES:
        (INFRA / example).parent.mkdir(exist_ok=True)
        (INFRA / example).write_text(render(example))
