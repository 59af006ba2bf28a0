"""run.json: what the trainer is told comes back whole, also from a training of before."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.pipeline.recipe import load_recipe
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import EncodeRun, ProfileConfig, RunConfig, TrainerExecution, parse_run

EXECUTION = TrainerExecution(parallel=ParallelConfig(tp=2), log_interval=3, profile=ProfileConfig(first_step=4))


def run_config() -> RunConfig:
    place = Path("/root")
    directories = dict.fromkeys(("hf_dir", "tokenized_dir", "bins_dir", "output_dir"), place)
    train = load_recipe().config.train
    return RunConfig(task="train", fingerprint="0" * 16, seq_len=64, train=train, execution=EXECUTION, **directories)


def test_it_comes_back_whole():
    run = run_config()
    assert RunConfig.model_validate_json(run.model_dump_json()) == run


def test_a_recipes_execution_is_what_the_trainer_is_told():
    settings = ["execution.parallel.tp=2", "execution.cluster.processes=2", "execution.log_interval=3"]
    execution = load_recipe(overrides=[*settings, "execution.profile.first_step=4"]).config.execution
    told = execution.trainer
    assert type(told) is TrainerExecution
    assert told == EXECUTION.model_copy(update={"checkpoint": execution.checkpoint})


def test_a_job_that_encodes_is_known_by_its_task():
    place = Path("/root")
    directories = dict.fromkeys(("hf_dir", "tokenized_dir", "features_dir", "output_dir"), place)
    encode = EncodeRun(num_shards=3, precision="bfloat16", dtype="float32", **directories)
    for run in (encode, run_config(), run_config().model_copy(update={"features_dir": place})):
        assert parse_run(run.model_dump_json()) == run
    with pytest.raises(ValidationError, match="num_shards"):
        parse_run(encode.model_copy(update={"num_shards": 0}).model_dump_json())
    with pytest.raises(ValidationError, match="Invalid JSON"):
        parse_run("{")
