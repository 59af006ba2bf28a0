"""The state in a checkpoint, in megatron-core's reshardable format, and its loading into any layout."""

import logging
import random
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import random as tensor_parallel_random
from torch.distributed.checkpoint import CheckpointException

from dataset_builders.errors import DamagedFile, InputError
from trainer.checkpoint import optimizer_state
from trainer.checkpoint.directory import newest_path, rename_damaged
from trainer.checkpoint.reader import CheckpointNotTrusted, CommonState, MetadataReader
from trainer.contract.checkpoint import KEPT_ASIDE, check_state_file, read_checkpoint_record, state_files
from trainer.layers.lora import trained_parameters
from trainer.libraries.megatron_private import set_device_rng_state
from trainer.parallel.fsdp import FullyShardedModel
from trainer.parallel.mesh import Mesh

log = logging.getLogger("athanor.trainer")

# The only kind of optimizer checkpoint that any other layout can read.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def newest_undamaged(directory: Path, mesh: Mesh) -> Path | None:
    """Return the newest undamaged checkpoint of a directory, or None; a collective. A newer, damaged checkpoint is
    renamed and reported in the log."""
    # Only rank 0 lists and renames, and all ranks use its path, so that no two resume from different steps.
    while path := mesh.from_main(newest_path(directory) if mesh.is_main else None):
        # Every rank must know of a damage in another rank's share, or ranks would go on differently.
        damages = [damage for damage in mesh.gather(_damage_of(path, mesh)) if damage]
        if not damages:
            return path
        if mesh.is_main:
            aside = rename_damaged(path)
            older = newest_path(directory)
            log.warning(
                "%s; it %s %s, and the training %s",
                damages[0],
                KEPT_ASIDE,
                aside.name,
                "starts from the beginning, because there is no older one"
                if older is None
                else f"resumes from {older.name}",
            )
    return None


def _damage_of(checkpoint: Path, mesh: Mesh) -> str | None:
    """Return the damage in this rank's share of a checkpoint's files, in one line; None if there is none."""
    try:
        if mesh.is_main:
            read_checkpoint_record(checkpoint)
        # Each rank reads a share of the files once; loading then finds them in the page cache.
        for path in state_files(checkpoint)[mesh.rank :: mesh.world_size]:
            check_state_file(path)
    except DamagedFile as error:
        return str(error).partition("; delete ")[0]
    return None


def load(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, checkpoint: Path, mesh: Mesh) -> None:
    """Fill the chunks of this rank and the optimizer from a checkpoint of any layout; a collective."""
    record = read_checkpoint_record(checkpoint)
    saved, step = record["parallel"]["sharding"], record["step"]
    ours = "fsdp" if isinstance(chunks[0], FullyShardedModel) else "distributed_optimizer"
    if saved != ours:  # the weights would fit, but not the optimizer's state
        raise InputError(
            f"{checkpoint} was saved with parallel.sharding={saved}, and this run has parallel.sharding={ours}; set "
            f"parallel.sharding={saved}, or export it and begin another training from its HF weights"
        )
    state = _load(state_of(chunks, optimizer, step, loading=True), checkpoint)
    restore_random_states(state["rng"], mesh.groups.tp.rank())
    if isinstance(chunks[0], FullyShardedModel):
        chunks[0].load_checkpoint_state(state, optimizer)
        return
    _load_models([chunk.module for chunk in chunks], state)
    # Rank 0's number of updates was loaded: see `_set_updates`.
    _set_updates(state["optimizer"], step)
    optimizer.load_state_dict(state["optimizer"])
    for adam in _torch_adams(optimizer):
        for of_param in adam.state.values():
            # megatron-core 0.16.1 loads one `step` tensor into all parameters, so that each update would count once per
            # parameter.
            of_param["step"] = of_param["step"].clone()


def load_model(models: Sequence[torch.nn.Module], checkpoint: Path) -> None:
    """Fill bare chunks, without optimizer, from a checkpoint of any layout; a collective."""
    _load_models(models, _load({name: state_of_model(model) for name, model in _named(models)}, checkpoint))


def _load_models(models: Sequence[torch.nn.Module], state: dict[str, Any]) -> None:
    for name, model in _named(models):
        if name in state:  # otherwise the checkpoint has nothing for this chunk
            # A checkpoint of a training with adapters lacks the frozen weights.
            model.load_state_dict(state[name], strict=not model.has_adapters)


def state_of_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return the checkpoint entries of a chunk's weights. With adapters these are only the trained parameters: all
    other weights are the base model's."""
    if not model.has_adapters:
        return model.sharded_state_dict()
    state = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})  # layers may have different adapters
    trained = {id(param) for param in trained_parameters(model)}
    return {name: entry for name, entry in state.items() if id(getattr(entry, "data", None)) in trained}


def _named(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """Return the chunks with names local to this rank. On disk, a tensor's name has its layer's index in the model."""
    return [(f"model{number}", model) for number, model in enumerate(models)]


def state_of(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, step: int, *, loading: bool
) -> dict[str, Any]:
    """Return the sharded state of this rank, for megatron-core to save or to load into. A state to save holds views."""
    _zero_adam_state(optimizer)
    rank = torch.distributed.get_rank()
    random_state = ShardedObject("rng", random_states(), (1,), (0,), replica_id=rank)  # rank 0 writes it, all read it
    if isinstance(chunks[0], FullyShardedModel):
        return {**chunks[0].checkpoint_state(optimizer, step), "rng": random_state}
    # Before the optimizer's state, which is made from the same entries.
    model_state = {name: state_of_model(model) for name, model in _named([chunk.module for chunk in chunks])}
    optimizer_state.install()
    sharded = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=_SHARDING)
    _set_updates(sharded, step)
    return {**model_state, "optimizer": sharded, "rng": random_state}


def _set_updates(state: dict[Any, Any], step: int) -> None:
    """Set the number of updates in the state of an optimizer. Rank 0 writes it for all ranks, and a rank has counted no
    updates of a group of which it holds no parameter."""
    for part in [state] if "optimizer" in state else state.values():
        for group in part["optimizer"]["param_groups"]:
            group["step"] = step


def _load(state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    try:
        # torch would read it too. If it cannot be read, torch looks for one file per rank and loses the reason.
        MetadataReader(checkpoint).read_metadata()
        return dist_checkpointing.load(state, str(checkpoint), common_strategy=CommonState())
    except (CheckpointException, CheckpointingException) as error:
        if any(isinstance(failure, CheckpointNotTrusted) for failure in [error, *_failures(error).values()]):
            raise InputError(
                f"{checkpoint} was not loaded: it asks for code to be run ({_reason(error)}), which no checkpoint "
                "of athanor does; delete it"
            ) from error
        raise InputError(
            f"{checkpoint} does not fit this model or is damaged ({_reason(error)}); choose another output directory "
            "or delete it"
        ) from error


def _reason(error: BaseException) -> str:
    """Return the first failure, shortened to a line, because some messages name every tensor of the checkpoint."""
    first = next((f"rank {rank}: {failure}" for rank, failure in _failures(error).items()), str(error))
    return textwrap.shorten(first, 300)


def _failures(error: BaseException) -> dict[int, BaseException]:
    """Return rank -> its error, if megatron-core reports the errors of ranks."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return {rank: failure for rank, (failure, _) in failures.items()}


def _torch_adams(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in chained if isinstance(part.optimizer, torch.optim.AdamW)]


def _zero_adam_state(optimizer: MegatronOptimizer) -> None:
    """Give torch's AdamW a zero state before its first step, because megatron-core needs one to save or to load."""
    for adam in _torch_adams(optimizer):
        dtype = getattr(adam, "moments", None)  # None: the parameter's
        for group in adam.param_groups:
            for param in group["params"]:
                if not adam.state[param]:
                    zeros = {name: torch.zeros_like(param, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
                    adam.state[param] = {"step": torch.tensor(0.0), **zeros}


def random_states() -> dict[str, Any]:
    """Return the states of this process's random number generators: dropout draws from them, and a resumed training
    continues its sequence. A checkpoint has those of rank 0, so that every layout can load them."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel_random.get_cuda_rng_tracker().get_states(),
    }


def restore_random_states(saved: dict[str, Any], tp_rank: int) -> None:
    """Set the states that `random_states` returned on rank 0 of any layout; a device's only where the kind is equal."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if saved["device"].shape != torch.cuda.get_rng_state().shape:  # a CPU's generator is not a GPU's
        return
    set_device_rng_state(saved["device"])
    tracker = tensor_parallel_random.get_cuda_rng_tracker()
    shared = tensor_parallel_random.get_data_parallel_rng_tracker_name()
    # Only generators that ranks share, except on tensor-parallel rank 0: with rank 0's states, other ranks would draw
    # rank 0's numbers for their own slices of divided weights.
    states = saved["tracker"] if tp_rank == 0 else {shared: saved["tracker"][shared]}
    tracker.set_states({**tracker.get_states(), **states})
