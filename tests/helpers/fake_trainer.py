"""A fake trainer that keeps the contract: run.json in; metrics.jsonl, checkpoints, result.json, hf/ out.

Run as a script with the path of run.json, or of the job.json of `verify`, whose loaders then all answer like our own
stage. FAKE_TRAINER in the environment makes it fail (fail, input, stop, die) or wait for SIGTERM. With `aside` it
reports that a checkpoint was damaged, and trains.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dataset_builders.contracts.manifest import file_entry
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import LAUNCHERS, Job
from stages.shared.launchers.torchrun import TorchrunLauncher
from trainer.contract.checkpoint import KEPT_ASIDE, write_checkpoint_record
from trainer.contract.names import (
    ADAPTER_EXPORT,
    EXIT_FAILED,
    EXIT_INPUT,
    EXIT_STOPPED,
    HF_EXPORT,
    METRICS_JSONL,
    RESULT_JSON,
)
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_config
from trainer.contract.result import MetricsRow, TrainResult
from trainer.contract.run import RunConfig

if TYPE_CHECKING:
    import pytest


class FakeTrainerLauncher(TorchrunLauncher):
    """The launcher of this host with this script instead of the trainer. It starts in a tenth of torchrun's time."""

    def __init__(self, cluster: ClusterConfig) -> None:
        super().__init__(cluster)

    def command(self, job: Job) -> list[str]:
        return [sys.executable, __file__, job.arguments[-1]]


def stand_in(patch: "pytest.MonkeyPatch") -> None:
    """Train by this script, and draw no curves, which cost a second a training. test_train_report.py has them."""
    patch.setitem(LAUNCHERS, "torchrun", "tests.helpers.fake_trainer:FakeTrainerLauncher")
    patch.setattr("stages.train.stage._curve_svg", lambda *_: "<svg></svg>")


def metrics_row(step: int, **changes: float) -> MetricsRow:
    """Return a plausible line of metrics.jsonl."""
    values = {name: 0.25 for name, field in MetricsRow.model_fields.items() if field.is_required()}
    values |= {"step": step, "tokens": 100 * step, "loss_tokens": 10 * step, "loss": 1 / step, "lr": 1e-3}
    return MetricsRow(**(values | changes))


def _train(run: RunConfig) -> TrainResult:
    steps = run.train.num_steps
    name = f"checkpoints/step-{steps:06d}"
    (run.output_dir / name).mkdir(parents=True, exist_ok=True)
    write_checkpoint_record(run.output_dir / name, {"step": steps, "fingerprint": run.fingerprint})
    with (run.output_dir / METRICS_JSONL).open("w") as file:
        for step in range(1, steps + 1):
            heldout = {"heldout_loss": 2.0} if step == steps else {}
            file.write(metrics_row(step, **heldout).model_dump_json() + "\n")
            file.flush()
    return TrainResult(status="finished", step=steps, checkpoint=name, loss=1 / steps, heldout_loss=2.0)


def _export(run: RunConfig) -> TrainResult:
    assert run.checkpoint_dir is not None and run.checkpoint_dir.is_dir()
    (run.output_dir / HF_EXPORT).mkdir(exist_ok=True)
    shutil.copyfile(run.hf_dir / "model.safetensors", run.output_dir / HF_EXPORT / "model.safetensors")
    if run.train.adapter is not None:
        import numpy as np  # here, because each training starts this script
        from safetensors.numpy import save_file

        name = "base_model.model.model.language_model.layers.0.mlp.down_proj"
        tensors = {f"{name}.lora_A.weight": np.zeros((4, 32), "f4"), f"{name}.lora_B.weight": np.zeros((16, 4), "f4")}
        (run.output_dir / ADAPTER_EXPORT).mkdir(exist_ok=True)
        save_file(tensors, run.output_dir / ADAPTER_EXPORT / ADAPTER_WEIGHTS)
        config = peft_config(run.train.adapter, [name.removeprefix("base_model.model.")], [])
        (run.output_dir / ADAPTER_EXPORT / ADAPTER_CONFIG).write_text(json.dumps(config))
    files = [file_entry(run.output_dir / HF_EXPORT, "model.safetensors")]
    return TrainResult(status="finished", step=1, files=files)


def _wait_for_sigterm(run: RunConfig) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    (run.output_dir / METRICS_JSONL).write_text(metrics_row(1).model_dump_json() + "\n")
    signal.pause()
    (run.output_dir / "saved").write_text("")


def _answer_alike(job: dict) -> None:
    count = len(json.loads(Path(job["questions"], "questions.json").read_text())["questions"])
    result = {"error": "", "rows": [{"prompt": None, "position": None}] * count, "seconds": 0.0, "dtype": "float32"}
    for name in job["loaders"]:
        Path(job["results"], f"{name}.json").write_text(json.dumps(result))


def main() -> int:
    asked = json.loads(Path(sys.argv[1]).read_text())
    if "loaders" in asked:
        _answer_alike(asked)
        return 0
    run = RunConfig.model_validate(asked)
    print("fake trainer", run.task, flush=True)
    how = os.environ.get("FAKE_TRAINER", "")
    if how == "aside":
        print(f"12:00:00 step-000004 is damaged; it {KEPT_ASIDE} damaged-step-000004", flush=True)
    answers = {
        "fail": (
            TrainResult(status="failed", step=3, message="loss is nan at step 4", keys=["a/00000001"]),
            EXIT_FAILED,
        ),
        "input": (
            TrainResult(status="failed", step=0, message="hf_dir has no weights", is_input_error=True),
            EXIT_INPUT,
        ),
        "stop": (TrainResult(status="stopped", step=3, checkpoint="checkpoints/step-000003"), EXIT_STOPPED),
    }
    if how == "die":
        os.abort()
    if how == "wait":
        answers["wait"] = answers["stop"]
        _wait_for_sigterm(run)
    result, status = answers.get(how) or ((_train if run.task == "train" else _export)(run), 0)
    (run.output_dir / RESULT_JSON).write_text(result.model_dump_json())
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
