"""run.json and metrics.jsonl come back whole, and other keys are refused."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.pipeline.recipe import load_recipe
from tests.helpers.fake_trainer import metrics_row
from trainer.contract.parallel import ParallelConfig
from trainer.contract.result import MetricsRow, parse_metrics
from trainer.contract.run import EncodeRun, ProfileConfig, RunConfig, TrainerExecution, parse_run

EXECUTION = TrainerExecution(parallel=ParallelConfig(tp=2), log_interval=3, profile=ProfileConfig(first_step=4))


def test_a_recipes_execution_is_what_the_trainer_is_told():
    settings = ["execution.parallel.tp=2", "execution.cluster.processes=2", "execution.log_interval=3"]
    execution = load_recipe(overrides=[*settings, "execution.profile.first_step=4"]).config.execution
    told = execution.trainer
    assert type(told) is TrainerExecution
    assert told == EXECUTION.model_copy(update={"checkpoint": execution.checkpoint})


def test_each_job_comes_back_whole_and_is_known_by_its_task():
    place, train = Path("/root"), load_recipe().config.train
    directories = {"hf_dir": place, "tokenized_dir": place, "output_dir": place}
    encode = EncodeRun(num_shards=3, precision="bfloat16", dtype="float32", features_dir=place, **directories)
    of_pixels = RunConfig(
        task="train", fingerprint="0" * 16, seq_len=64, train=train, execution=EXECUTION, bins_dir=place, **directories
    )
    for run in (encode, of_pixels, of_pixels.model_copy(update={"features_dir": place})):
        assert parse_run(run.model_dump_json()) == run
    with pytest.raises(ValidationError, match="num_shards"):
        parse_run(encode.model_copy(update={"num_shards": 0}).model_dump_json())
    with pytest.raises(ValidationError, match="Invalid JSON"):
        parse_run("{")


def test_numbers_of_parts_are_read_back_under_their_names():
    row = metrics_row(1, adapter_grad_norm=None, vision_seconds=0.5, language_tflops=2.0)
    (again,) = parse_metrics(row.model_dump_json().encode())
    assert again == row
    assert again.model_extra == {"adapter_grad_norm": None, "vision_seconds": 0.5, "language_tflops": 2.0}


@pytest.mark.parametrize("changes", [{"los": 1.0}, {"vision_seconds": "soon"}])
def test_other_keys_and_values_are_refused(changes):
    with pytest.raises(ValidationError, match=next(iter(changes))):
        MetricsRow(**metrics_row(1).model_dump() | changes)
