"""Checkpoints: megatron-core's reshardable format in `step-000500/`, published by one rename, never half there.

    checkpoints/step-000500/athanor.json   {"format_version", "fingerprint", "step", "train"}, read before anything else
    checkpoints/step-000500/...            model, optimizer states, main parameters (dist_checkpointing)
    checkpoints/saving-step-000500/        a save that did not end; deleted by the next one

The data position is the step alone (see trainer/data.py); the learning rate is a function of it.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_json
from dataset_builders.contracts.fingerprint import describe_drift
from trainer.contract import CHECKPOINTS, RunConfig
from trainer.distributed import Mesh

FORMAT_VERSION = 1
META = "athanor.json"
_NAME = re.compile(r"step-(\d{6,})")
# The only kind of optimizer checkpoint that any other layout can read.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    found = [(int(m[1]), p) for p in directory.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found) if (path / META).is_file()]


def read_step(checkpoint: Path, run: RunConfig) -> int:
    """The step of a checkpoint, after making sure that it belongs to this run.

    Raises:
        InputError: another format, or a checkpoint of another training config.
    """
    meta = json.loads((checkpoint / META).read_text())
    if meta["format_version"] != FORMAT_VERSION:
        raise InputError(
            f"{checkpoint}: format_version is {meta['format_version']}, this code reads {FORMAT_VERSION}; delete it"
        )
    if meta["fingerprint"] != run.fingerprint:
        drift = describe_drift(meta["train"], run.train.model_dump(mode="json")) or "its data or its base model"
        raise InputError(
            f"{checkpoint} belongs to another training ({drift}); choose another output directory or delete it"
        )
    return meta["step"]


def save(model: DistributedDataParallel, optimizer: MegatronOptimizer, step: int, run: RunConfig, mesh: Mesh) -> Path:
    """Save everything that a resume needs, then drop the oldest beyond `keep_last`; a collective."""
    directory = run.output_dir / CHECKPOINTS
    final, work = directory / checkpoint_name(step), directory / f"saving-{checkpoint_name(step)}"
    if mesh.is_main:
        for unfinished in directory.glob("saving-*"):
            shutil.rmtree(unfinished)
        work.mkdir(parents=True)
    _barrier(mesh)
    dist_checkpointing.save(_state(model, optimizer, loading=False), str(work))
    _barrier(mesh)
    if mesh.is_main:
        meta = {
            "format_version": FORMAT_VERSION,
            "fingerprint": run.fingerprint,
            "step": step,
            "train": run.train.model_dump(mode="json"),
        }
        write_json(work / META, meta)
        if final.exists():
            shutil.rmtree(final)
        work.rename(final)
        for old in list_checkpoints(directory)[: -run.checkpoint.keep_last]:
            shutil.rmtree(old)
    _barrier(mesh)
    return final


def load(model: DistributedDataParallel, optimizer: MegatronOptimizer, checkpoint: Path) -> None:
    """Fill model and optimizer from a checkpoint of any layout; a collective."""
    _give_adam_its_state(optimizer)
    state = dist_checkpointing.load(_state(model, optimizer, loading=True), str(checkpoint))
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    _unshare_adam_step(optimizer)


def load_model(model: torch.nn.Module, checkpoint: Path) -> None:
    """Fill a bare model, without optimizer, from a checkpoint of any layout."""
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))
    model.load_state_dict(state["model"])


def _state(model: DistributedDataParallel, optimizer: MegatronOptimizer, *, loading: bool) -> Mapping[str, Any]:
    model_state = model.module.sharded_state_dict()
    optimizer_state = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=_SHARDING)
    return {"model": model_state, "optimizer": optimizer_state}


def _barrier(mesh: Mesh) -> None:
    if mesh.world_size > 1:
        torch.distributed.barrier()


def _torch_adams(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    parts = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [part for part in parts if isinstance(part, torch.optim.AdamW)]


def _give_adam_its_state(optimizer: MegatronOptimizer) -> None:
    """torch's AdamW has no state before its first step, and megatron-core cannot load into none."""
    for adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for param in group["params"]:
                if not adam.state[param]:
                    adam.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param),
                        "exp_avg_sq": torch.zeros_like(param),
                    }


def _unshare_adam_step(optimizer: MegatronOptimizer) -> None:
    """megatron-core 0.16.1 loads one `step` tensor into all parameters: each update would count it once for each."""
    for adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()
