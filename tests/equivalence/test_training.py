"""Whole training runs, started as users start them: against transformers, interrupted, on two ranks."""

import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from tests.equivalence.test_checkpoints import wait_for
from tests.helpers.reference import load_reference, reference_losses
from tests.helpers.run_dir import (
    OPTIM,
    changed,
    log_of,
    make_bins,
    metrics_of,
    model_dir,
    run_trainer,
    start_trainer,
    write_job,
)
from tests.helpers.tiers import full
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import ExpertsConfig, OptimConfig, RunConfig
from trainer.data.order import bins_at

SEED, GLOBAL_BATCH = 5, 2


@pytest.mark.parametrize(
    ("shape", "coefficient"),
    [
        ("first", 0.0),
        full("hybrid-first", 0.0),
        full("hybrid-second", 0.0),
        full("experts-shared", 0.0),
        full("experts-many", 1e-3),
        full("experts-sparse", 1e-3),
        full("experts-listed", 0.1),
    ],
)
@pytest.mark.promise(
    "Thirty steps equal transformers with torch's AdamW: losses to 1e-4, gradient norms to 1e-3, with experts too."
)
def test_thirty_steps_equal_transformers_with_torch_adamw(shape, coefficient, tmp_path):
    """Those of experts with transformers' own auxiliary loss, which pools the tokens of all layers, of each bin."""
    run = write_job(tmp_path, num_steps=30, shape=shape)
    run = changed(run, train=run.train.model_copy(update={"experts": ExpertsConfig(coefficient=coefficient)}))
    assert run_trainer(run, processes=0) == 0, log_of(run)
    expected = reference_training(load_reference(model_dir(shape)), shape, num_steps=30, coefficient=coefficient)
    rows = metrics_of(run)
    assert [row.step for row in rows] == list(range(1, 31))
    for row, (loss, grad_norm, lr) in zip(rows, expected, strict=True):
        assert row.lr == pytest.approx(lr, rel=1e-12)
        assert row.loss == pytest.approx(loss, rel=1e-4), row.step
        assert row.grad_norm == pytest.approx(grad_norm, rel=1e-3), row.step
    assert rows[-1].loss < 0.5 * rows[0].loss


def reference_training(
    model: torch.nn.Module, shape: str, num_steps: int, optim: OptimConfig = OPTIM, coefficient: float = 0.0
) -> list[tuple[float, float, float]]:
    """(loss, gradient norm, learning rate) of each step, by transformers, one sample at a time. A step without an image
    has gradients of zero for the vision encoder, as on ranks that share a step: weights decay, moments go on.

    Args:
        coefficient: factor of the experts' auxiliary loss, which is not part of the loss that is returned.
    """
    bins = make_bins(shape)
    routed: list[torch.Tensor] = []  # (tokens, E) router logits, of each layer of a sample
    for name, module in model.named_modules() if coefficient else ():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, out: routed.append(out[0]))
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (optim.adam_beta1, optim.adam_beta2)
    adam = torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.adam_eps)
    for param in trained:
        param.grad = torch.zeros_like(param)
    order = bins_at([len(bins)], SEED, np.arange(num_steps * GLOBAL_BATCH))
    rows = []
    for step in range(num_steps):
        lr = optim.lr * (step + 1) / optim.warmup_steps
        if step >= optim.warmup_steps:
            done = (step - optim.warmup_steps) / (num_steps - 1 - optim.warmup_steps)
            lr = optim.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.zero_grad(set_to_none=False)
        chosen = [bins[number] for number in order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]]
        of_bins, auxiliary = [], 0.0
        for samples in chosen:
            routed.clear()
            of_bins.append(torch.cat([reference_losses(model, sample) for sample in samples]))
            if coefficient:  # layers have equal weights, so the order of the rows does not matter
                text = model.config.text_config
                pooled = load_balancing_loss_func((torch.cat(routed),), text.num_experts, text.num_experts_per_tok)
                auxiliary = auxiliary + coefficient * len(of_bins[-1]) * pooled
        losses = torch.cat(of_bins)
        (losses.mean() + auxiliary / len(losses)).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, optim.clip_grad_norm)
        adam.step()
        rows.append((losses.mean().item(), float(norm), lr))
    return rows


@pytest.mark.promise(
    "Saves change no bit of a training; a kill at any point of a save, or a full disk, costs that save alone; "
    "SIGTERM ends with one, and what was killed with -9 goes on to the bit."
)
@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "ep", "precision", "moments"),
    [
        ("first", 1, "float32", "float32"),
        ("hybrid-second", 1, "float32", "float32"),
        ("hybrid-first", 1, "bfloat16", "float32"),
        ("hybrid-first", 1, "bfloat16", "bfloat16"),
        ("experts-shared", 2, "float32", "float32"),
    ],
)
def test_killed_and_resumed_is_bit_equal(shape, ep, precision, moments, tmp_path):
    def six_steps(name: str, save_interval: int) -> RunConfig:
        optim = OPTIM.model_copy(update={"moments": moments})
        layout = ParallelConfig(ep=ep)
        run = write_job(
            tmp_path, num_steps=6, shape=shape, save_interval=save_interval, parallel=layout, optim=optim, name=name
        )
        return changed(run, train=run.train.model_copy(update={"precision": precision}))

    whole, run = six_steps("whole", 1000), six_steps("killed", 3)
    assert run_trainer(whole, processes=ep if ep > 1 else 0) == 0, log_of(whole)
    process = start_trainer(run, ep)
    wait_for(lambda: (run.output_dir / "checkpoints/step-000003/athanor.json").is_file(), run, process)
    os.killpg(process.pid, signal.SIGKILL)
    kill_children_of(run)
    process.wait()
    for late in run.output_dir.glob("checkpoints/step-000006"):
        pytest.fail(f"{late}: the kill came too late to show anything")
    # A save that was cut short, and a directory without its record, must not be taken for checkpoints.
    (run.output_dir / "checkpoints/saving-step-000004").mkdir()
    (run.output_dir / "checkpoints/step-000005").mkdir()
    assert run_trainer(run, ep) == 0, log_of(run)
    assert "resumed at step 3" in log_of(run)
    for ours, theirs in zip(metrics_of(run), metrics_of(whole), strict=True):
        for name in ("step", "loss", "grad_norm", "param_norm", "heldout_loss", "tokens", "loss_tokens"):
            assert getattr(ours, name) == getattr(theirs, name), (ours.step, name)


def kill_children_of(run) -> None:
    """torchrun gives each worker a session of its own, so that killing its group leaves the worker."""
    needle = str(run.output_dir / "run.json")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if needle in command:
            os.kill(int(pid), signal.SIGKILL)
