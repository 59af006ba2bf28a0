"""The command in a run's description gives the same configuration again."""

import shlex

import pytest
import yaml

from flows.pipeline.mlflow_run import execution_yaml, reproducing_command
from flows.pipeline.recipe import load_recipe


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["train.optim.lr=1e-5", "execution.cluster.processes=2", "execution.parallel.tp=2"],
        ["convert.subsets=[digits_single, digits_text]", "tokenize.system_prompt='It''s a \"digit\", $HOME'"],
        ["data=/data/with a space", "execution.dask_address=tcp://host:8786", "execution.registry.margin=0.01"],
    ],
)
def test_the_command_gives_the_same_configuration(overrides):
    config = load_recipe("embedded", overrides).config
    words = shlex.split(reproducing_command(config, "embedded").replace("\\\n", ""))
    assert words[:3] == ["athanor", "run", "embedded"] and words[3::2] == ["--set"] * (len(words[4::2]))
    assert load_recipe("embedded", words[4::2]).config == config


def test_a_recipe_of_the_persons_own_has_no_command(tmp_path):
    assert reproducing_command(load_recipe("embedded").config, "my-recipe") is None


def test_execution_is_one_file_with_the_launcher_in_use_and_what_is_set():
    plain = yaml.safe_load(execution_yaml(load_recipe("embedded").config))
    assert plain["cluster"]["launcher"] == "torchrun" and "num_workers" in plain
    assert "job_file" not in plain["cluster"]
    slurm = load_recipe("embedded", ["execution.cluster.launcher=slurm", "execution.cluster.job_file=h200.sbatch"])
    assert "job_file: h200.sbatch" in execution_yaml(slurm.config)
