"""A training whose job also trains other runs over the same base: each run gets the artifact that it makes alone."""

import filelock
import pytest

from stages.artifacts.run_stage import companions_of, run_stage
from stages.artifacts.workers import StageResources
from stages.train import stage as train
from stages.train.run_trainer import TrainerFailed
from tests.stages.train.test_train_stage import CONFIG, fake_trainer, inputs
from trainer.contract.adapter import AdapterConfig
from trainer.contract.run import TrainConfig

pytestmark = pytest.mark.promise(
    "Runs of a sweep over one loaded base have the losses, adapters and moments of a process of their own, to the bit."
)

__all__ = ["fake_trainer", "inputs"]
pytestmark = pytest.mark.full
CONFIGS = [
    CONFIG.model_copy(update={"seed": seed, "adapter": AdapterConfig(rank=4 + seed, alpha=8)}) for seed in range(3)
]


class Sweep:
    """Runs of CONFIGS in one root; `lines` are the lines of all jobs."""

    def __init__(self, inputs, root) -> None:
        self.inputs, self.root, self.lines = inputs, root, []
        self.others = companions_of(train.STAGE, CONFIGS, inputs, root)

    def run(self, number: int, config: TrainConfig | None = None):
        resources = StageResources(on_line=self.lines.append, companions=self.others[number + 1 :])
        return run_stage(train.STAGE, config or CONFIGS[number], self.inputs, self.root, resources)

    def started(self) -> tuple[int, int]:
        """Return the number of jobs, and of runs that were trained beside another."""
        beside = sum("fake trainer beside" in line for line in self.lines)
        return sum("fake trainer train" in line for line in self.lines), beside


@pytest.fixture
def sweep(inputs, tmp_path):
    return Sweep(inputs, tmp_path)


def test_one_job_trains_all_and_each_run_makes_its_own_artifact(sweep, tmp_path, inputs):
    results = [sweep.run(number) for number in range(3)]
    assert sweep.started() == (1, 2) and not any(result.reused for result in results)
    alone = Sweep(inputs, tmp_path / "alone")
    alone.others = ()
    for number, result in enumerate(results):
        expected = alone.run(number).artifact.dir
        assert (result.artifact.dir / "manifest.json").read_bytes() == (expected / "manifest.json").read_bytes()
        files = {path.name for path in expected.iterdir()} - {"logs"}
        assert files == {path.name for path in result.artifact.dir.iterdir()} - {"logs"}
    assert alone.started() == (3, 0) and sweep.run(0).reused


def test_a_run_that_another_process_trains_or_that_is_made_is_left_out_without_waiting(sweep):
    sweep.run(2)
    taken = sweep.others[1].work
    with filelock.FileLock(taken.with_name(f"{taken.name}.lock")):
        sweep.run(0)
    assert sweep.started() == (2, 0)
    sweep.run(1)
    assert sweep.started() == (3, 0)


def test_a_run_that_fails_beside_others_is_tried_again_by_itself(sweep, monkeypatch, inputs):
    failing = [config.model_copy(update={"seed": 1}) for config in (CONFIGS[1], CONFIGS[2])]
    sweep.others = companions_of(train.STAGE, [CONFIGS[0], *failing, CONFIGS[2]], inputs, sweep.root)
    monkeypatch.setenv("FAKE_TRAINER", "beside")
    assert not sweep.run(0).reused and sweep.started() == (1, 3)
    monkeypatch.setenv("FAKE_TRAINER", "fail")
    with pytest.raises(TrainerFailed, match="loss is nan at step 4"):
        sweep.run(1, failing[0])
    assert not sweep.run(3, CONFIGS[2]).reused
    assert sweep.started() == (2, 3)


def test_a_run_whose_job_ended_early_takes_the_unfinished_ones_along(sweep, monkeypatch):
    monkeypatch.setenv("FAKE_TRAINER", "stop")
    with pytest.raises(RuntimeError, match="run the same command again"):
        sweep.run(0)
    for each in sweep.others[1:]:
        (each.work / "result.json").unlink()
    monkeypatch.delenv("FAKE_TRAINER")
    assert [sweep.run(number).reused for number in range(3)] == [False] * 3
    assert sweep.started() == (2, 4)
