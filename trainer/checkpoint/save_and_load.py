"""Checkpoints: megatron-core's reshardable format in `step-000500/`, published by one rename, never half there.

    checkpoints/step-000500/athanor.json   what it is, read before anything else (see `_publish`)
    checkpoints/step-000500/...            model, optimizer states, main parameters, RNG (dist_checkpointing)
    checkpoints/saving-step-000500/        a save that has not ended; deleted by the next save
    checkpoints/deleting-step-000500/      a deletion that has not ended; deleted by the next save

The data position is the step alone (see trainer/data/order.py); the learning rate is a function of it. A forked process
can write the files while training goes on (trainer/checkpoint/writer.py). The trainer itself writes the record and
renames the directory, at a step where every rank's writing has ended.
"""

import contextlib
import gc
import json
import logging
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint import CheckpointException

from dataset_builders.contracts.fingerprint import describe_drift
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_json
from trainer.checkpoint import rng
from trainer.checkpoint.reader import CheckpointNotTrusted, CommonState, check_metadata
from trainer.checkpoint.writer import OneWriter
from trainer.contract.names import CHECKPOINTS
from trainer.contract.run import RunConfig
from trainer.parallel.fsdp import FullyShardedModel
from trainer.parallel.mesh import Mesh

log = logging.getLogger("athanor.trainer")

FORMAT_VERSION = 2  # 2: with RNG states
META = "athanor.json"
_NAME = re.compile(r"step-(\d{6,})")
# The only kind of optimizer checkpoint that any other layout can read.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def list_checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    steps = [(int(m[1]), p) for p in directory.glob("step-*") if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(steps) if (path / META).is_file()]


def read_step(checkpoint: Path, run: RunConfig) -> int:
    """The step of a checkpoint, after a check that it belongs to this run.

    Raises:
        InputError: the checkpoint has another format, or belongs to another training config.
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


class Checkpointer:
    """Saves the training's state, one save at a time. Every method is a collective: all ranks call it at the same step.

    Raises (any method):
        RuntimeError: a save failed, on all ranks; names its directory. Earlier checkpoints are untouched.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, run: RunConfig, mesh: Mesh
    ) -> None:
        self._chunks, self._optimizer, self._run, self._mesh = chunks, optimizer, run, mesh
        self._directory = run.output_dir / CHECKPOINTS
        self._work = self._directory
        self._running = AsyncCallsQueue()
        # megatron-core collects garbage in every save: 0.25 s for objects that were loaded before training and stay.
        gc.freeze()

    def save(self, step: int) -> None:
        """Save everything that a resume needs, as it is now. An asynchronous save writes its files later."""
        self.finish()
        self._work = self._directory / f"saving-{checkpoint_name(step)}"
        if self._mesh.is_main:
            for leftover in (*self._directory.glob("saving-*"), *self._directory.glob("deleting-*")):
                shutil.rmtree(leftover)
            self._work.mkdir(parents=True)
        _barrier(self._mesh)
        state = _state(self._chunks, self._optimizer, loading=False)
        request = dist_checkpointing.save(state, str(self._work), sharded_strategy=OneWriter(), async_sharded_save=True)
        request.add_finalize_fn(lambda: self._publish(step))
        with self._readable():
            if self._run.execution.checkpoint.asynchronous:
                self._running.schedule_async_request(request)
            else:
                request.execute_sync()

    def poll(self) -> None:
        """Publish the running save if every rank's files are written. Costs one small collective while a save runs."""
        with self._readable():
            self._running.maybe_finalize_async_calls()

    def finish(self) -> None:
        """Wait for the running save, and publish it."""
        with self._readable():
            self._running.maybe_finalize_async_calls(blocking=True)

    def _publish(self, step: int) -> None:
        """Write the record, rename the directory, and delete checkpoints that are not kept."""
        if self._mesh.is_main:
            meta = {
                "format_version": FORMAT_VERSION,
                "fingerprint": self._run.fingerprint,
                "step": step,
                "train": self._run.train.model_dump(mode="json"),
                # For people, apart from `sharding`: any layout can load a checkpoint.
                "parallel": self._run.execution.parallel.model_dump(mode="json"),
                "world_size": self._mesh.world_size,
            }
            write_json(self._work / META, meta)
            final = self._directory / checkpoint_name(step)
            if final.exists():
                _delete(final)
            self._work.rename(final)
            log.info("checkpoint: %s", final.name)
            keep = self._run.execution.checkpoint
            for old in list_checkpoints(self._directory)[: -keep.keep_last]:
                if keep.keep_every is None or int(_NAME.fullmatch(old.name)[1]) % keep.keep_every:
                    _delete(old)
        _barrier(self._mesh)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        """Give all ranks one line with the reason: megatron-core raises on all of them, and tells rank 0 alone why."""
        try:
            yield
        except CheckpointException as error:
            reason = [_reason(error)]
            if self._mesh.world_size > 1:
                torch.distributed.broadcast_object_list(reason, src=0)
            raise RuntimeError(
                f"{self._work}: this checkpoint could not be written ({reason[0]}); earlier ones are whole, and the "
                "next run goes on from the newest"
            ) from error


def load(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, checkpoint: Path, mesh: Mesh) -> None:
    """Fill the chunks of this rank and the optimizer from a checkpoint of any layout; a collective.

    Raises:
        InputError: the checkpoint belongs to another model or sharding, or cannot be read.
    """
    _check_sharding(chunks[0], checkpoint)
    _give_adam_its_state(optimizer)
    state = _load(_state(chunks, optimizer, loading=True), checkpoint)
    rng.restore(state["rng"], mesh.groups.tp.rank())
    if isinstance(chunks[0], FullyShardedModel):
        chunks[0].load_checkpoint_state(state, optimizer)
        return
    for name, model in _named([chunk.module for chunk in chunks]):
        model.load_state_dict(state[name])
    optimizer.load_state_dict(state["optimizer"])
    _unshare_adam_step(optimizer)


def _check_sharding(chunk: DistributedDataParallel | FullyShardedModel, checkpoint: Path) -> None:
    """Refuse a checkpoint of the other sharding: its weights would fit, the state of its optimizer does not."""
    saved = json.loads((checkpoint / META).read_text())["parallel"]["sharding"]
    ours = "fsdp" if isinstance(chunk, FullyShardedModel) else "distributed_optimizer"
    if saved != ours:
        raise InputError(
            f"{checkpoint} was saved with parallel.sharding={saved}, and this run has parallel.sharding={ours}; set "
            f"parallel.sharding={saved}, or export it and begin another training from its HF weights"
        )


def load_model(models: Sequence[torch.nn.Module], checkpoint: Path) -> None:
    """Fill bare chunks, without optimizer, from a checkpoint of any layout; a collective.

    Raises:
        InputError: the checkpoint belongs to another model, or cannot be read.
    """
    state = _load({name: model.sharded_state_dict() for name, model in _named(models)}, checkpoint)
    for name, model in _named(models):
        model.load_state_dict(state[name])


def _named(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    """The chunks under this rank's own names. On disk, a tensor's name has its layer's number in the whole model."""
    return [(f"model{number}", model) for number, model in enumerate(models)]


def _state(chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, *, loading: bool) -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    random_state = ShardedObject("rng", rng.capture(), (1,), (0,), replica_id=rank)  # rank 0 writes it, all read it
    if isinstance(chunks[0], FullyShardedModel):
        return {**chunks[0].checkpoint_state(optimizer), "rng": random_state}
    model_state = {name: model.sharded_state_dict() for name, model in _named([chunk.module for chunk in chunks])}
    with _padded_buckets(optimizer):
        optimizer_state = optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=_SHARDING)
    return {**model_state, "optimizer": optimizer_state, "rng": random_state}


@contextlib.contextmanager
def _padded_buckets(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Have megatron-core 0.16.1 save the right numbers if a buffer has several buckets, as on pipeline ranks of tied
    embeddings. It puts the gathered buckets end to end without their padding, and then takes each parameter from its
    place with padding: all after the first bucket would get their neighbours' values, and zeros at the end.
    """
    buffers = [b for part in _parts(optimizer) if isinstance(part, DistributedOptimizer) for b in part.buffers]
    sizes = [(sized, sized.numel_unpadded) for b in buffers for sized in (b, *b.buckets)]
    for buffer in buffers:
        buffer.numel_unpadded = buffer.numel
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
    try:
        yield
    finally:
        for sized, numel in sizes:
            sized.numel_unpadded = numel


def _load(state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    try:
        check_metadata(checkpoint)
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
    """The first failure, cut to a line: some messages name every tensor of the checkpoint."""
    first = next((f"rank {rank}: {failure}" for rank, failure in _failures(error).items()), str(error))
    return textwrap.shorten(first, 300)


def _failures(error: BaseException) -> dict[int, BaseException]:
    """Rank -> its error, if megatron-core tells."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return {rank: failure for rank, (failure, _) in failures.items()}


def _delete(checkpoint: Path) -> None:
    """Rename first: a deletion that is cut short must leave nothing that looks like a whole checkpoint."""
    doomed = checkpoint.with_name(f"deleting-{checkpoint.name}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _barrier(mesh: Mesh) -> None:
    if mesh.world_size > 1:
        torch.distributed.barrier()


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _torch_adams(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in _parts(optimizer) if isinstance(part.optimizer, torch.optim.AdamW)]


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
    """megatron-core 0.16.1 loads one `step` tensor into all parameters: each update would count once per parameter."""
    for adam in _torch_adams(optimizer):
        for state in adam.state.values():
            state["step"] = state["step"].clone()
