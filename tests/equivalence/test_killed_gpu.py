"""A training of delta layers in bf16 on a GPU, killed with -9 and started again: the bits of one that was not disturbed
where the kernels give the same bits twice; else no further off than the same training is from itself, times ten, for
small differences grow from step to step."""

import os
import signal
from pathlib import Path

import pytest

from tests.equivalence.test_checkpoints import wait_for
from tests.helpers.hardware import requires_gpus
from tests.helpers.run_dir import OPTIM, changed, log_of, metrics_of, run_trainer, start_trainer, write_job
from trainer.contract.run import RunConfig

pytestmark = pytest.mark.promise(
    "Saves change no bit of a training; a kill at any point of a save, or a full disk, costs that save alone; "
    "SIGTERM ends with one, and what was killed with -9 goes on to the bit."
)

SAVED_AT = 3
STEPS = 30  # enough for the kill to come between a save and the end
SAME = ("loss", "heldout_loss", "grad_norm", "param_norm")


def low(root: Path, name: str, shape: str, moments: str, save_interval: int = 1000) -> RunConfig:
    """A job in bfloat16."""
    optim = OPTIM.model_copy(update={"moments": moments})
    run = write_job(root, num_steps=STEPS, shape=shape, save_interval=save_interval, optim=optim, name=name)
    run = changed(run, train=run.train.model_copy(update={"precision": "bfloat16"}))
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    return run


def trained(run: RunConfig) -> RunConfig:
    assert run_trainer(run, processes=0) == 0, log_of(run)
    return run


def kill_and_resume(run: RunConfig) -> RunConfig:
    process = start_trainer(run, processes=0)
    wait_for(lambda: (run.output_dir / f"checkpoints/step-{SAVED_AT:06d}/athanor.json").is_file(), run, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (run.output_dir / f"checkpoints/step-{STEPS:06d}").exists(), "the kill came too late to show anything"
    trained(run)
    assert log_of(run).count("resumed at step") == 1
    return run


def distance(ours: RunConfig, theirs: RunConfig) -> float:
    """The largest relative difference of any row."""
    pairs = [
        (getattr(a, name), getattr(b, name))
        for a, b in zip(metrics_of(ours), metrics_of(theirs), strict=True)
        for name in SAME
    ]
    assert all((a is None) is (b is None) for a, b in pairs) and len(pairs) == STEPS * len(SAME)
    return max(abs(a / b - 1) for a, b in pairs if a is not None)


@requires_gpus(1)
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["first", "hybrid-second", "hybrid-third"])
def test_on_a_gpu(tmp_path, shape, moments):
    whole, again = (trained(low(tmp_path, name, shape, moments)) for name in ("whole", "again"))
    found = distance(kill_and_resume(low(tmp_path, "killed", shape, moments, SAVED_AT)), whole)
    noise = distance(again, whole)
    print(f"\n{shape}, moments in {moments}: the same twice {noise:.1e}, killed and resumed {found:.1e}")
    assert found <= 10 * noise
