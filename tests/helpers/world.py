"""Many ranks on one machine, quickly: a server that has imported everything forks the processes of each job.

`run_world(run, processes)` trains as `torchrun ... -m trainer` would, and returns what each rank saw. `start(module)`
runs a module as `python -m` would. Starting sixteen processes by torchrun on two cores takes two minutes of imports; a
fork takes none.
"""

import atexit
import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from safetensors.torch import load_file

from tests.helpers.object_store import free_port
from tests.helpers.patience import at_most
from tests.helpers.started import Started, start_module
from trainer.checkpoint import saver
from trainer.checkpoint.hf_weights import is_of_experts
from trainer.checkpoint.saver import Written
from trainer.contract.names import HF_EXPORT
from trainer.contract.result import MetricsRow, read_metrics
from trainer.contract.run import RunConfig
from trainer.data.reader import BinReader
from trainer.libraries.megatron_private import OneFile, prepare_runtime
from trainer.loop import train as loop
from trainer.loop.export import export, write_weights
from trainer.loop.set_up import set_up_vision_rank
from trainer.parallel.mesh import Mesh, rank_mesh
from trainer.parallel.vision.exchange import VisionWorker


@dataclass(frozen=True)
class World:
    """The results of a job.

    Attributes:
        rows: rows of metrics.jsonl.
        ranks: for each rank: `drift`, the largest difference between copies of a parameter after the last step;
            `loss_tokens` and `encoded` of each micro batch that it read; `pixels`, whether it got any; `layers`, the
            indexes of its language layers; `open`, the largest number of micro batches whose dealt images waited for
            gradients.
    """

    rows: list[MetricsRow]
    ranks: list[dict[str, object]]


MODELS = ("trainer.families.qwen3_vl.model", "trainer.parts.delta.module", "trainer.parts.experts.module")
STUCK_SECONDS = 200  # a rank that is still running then writes its stack, and ends

_SERVER: list[subprocess.Popen] = []


def exported(run: RunConfig) -> dict[str, torch.Tensor]:
    """Return the complete weights after the last step, under their HF names."""
    return load_file(run.output_dir / HF_EXPORT / "model.safetensors")


def run_world(run: RunConfig, processes: int, *, save: bool = False) -> World:
    """Train in a world of `processes` ranks.

    Args:
        save: whether to write the tensors of checkpoints, which takes longer than the training.

    Raises:
        AssertionError: a rank failed; the message has its last lines.
    """
    (run.output_dir / "run.json").write_text(run.model_dump_json())
    codes = _ask("run_job", str(run.output_dir), processes, save)
    logs = {rank: (run.output_dir / f"rank-{rank}.log").read_text()[-3000:] for rank, c in enumerate(codes) if c}
    assert not logs, "\n".join(f"rank {rank}:\n{text}" for rank, text in logs.items())
    return world_of(run, processes)


def world_of(run: RunConfig, processes: int) -> World:
    """Return the results that a job has left."""
    ranks = [json.loads((run.output_dir / f"rank-{rank}.json").read_text()) for rank in range(processes)]
    return World(read_metrics(run.output_dir), ranks)


def start(
    module: str,
    *arguments: object,
    log: Path,
    environment: Mapping[str, str] | None = None,
    max_file_bytes: int | None = None,
) -> Started:
    """Run a module as `python -m` would, in a session of its own.

    Args:
        log: file to which its output is appended.
        environment: variables in addition to those of the tests.
        max_file_bytes: limit of the size of each file that it writes.
    """
    status = log.with_name(f"{uuid.uuid4().hex}.status")
    place = [str(log), str(status), dict(environment or {}), max_file_bytes]
    return Started(_ask("start_module", module, [str(argument) for argument in arguments], *place), status)


def start_ranks(module: str, processes: int, *arguments: object, log: Path) -> list[Started]:
    """Run a module in a world of several ranks, which find each other by torchrun's variables."""
    port = free_port()
    return [start(module, *arguments, log=log, environment=_place(rank, processes, port)) for rank in range(processes)]


def _place(rank: int, world: int, port: int) -> dict[str, str]:
    """Return torchrun's variables of a rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return {name: str(value) for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items()}


def _ask(job: str, *arguments: object) -> Any:
    """Return the answer of the server, which the first question starts."""
    if not _SERVER:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        program = "import gc; gc.disable(); from tests.helpers import world; world.serve()"
        command = [sys.executable, "-W", "ignore", "-c", program]
        _SERVER.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env))
        atexit.register(_SERVER[0].kill)
    server = _SERVER[0]
    server.stdin.write(json.dumps([job, *arguments]) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def serve() -> None:
    """Read jobs from standard input, and answer each in one line."""
    for model in MODELS:  # a rank would import them itself, by their names
        import_module(model)
    # Nearly all that ranks which stay alive between jobs would gain is gained here too.
    gc.freeze()  # otherwise each collection of each rank visits all imported objects, and so copies their pages
    gc.enable()
    jobs = {"run_job": _run_job, "start_module": start_module}
    for line in sys.stdin:
        job, *arguments = json.loads(line)
        print(json.dumps(jobs[job](*arguments)), flush=True)


def _run_job(directory: str, processes: int, save: bool) -> list[int]:
    """Run a job and return the exit codes of its ranks."""
    fork = multiprocessing.get_context("fork")
    # torchrun does the same: the agent holds the store, the ranks are its clients.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A rank that is forked while the store's thread serves another one may inherit a lock that nobody will open: so
    # all of them exist before the first one uses it.
    all_there = fork.Event()
    ranks = [
        fork.Process(target=_rank, args=(Path(directory), rank, processes, store.port, save, all_there))
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    all_there.set()
    _end_all_when_one_fails(ranks)
    return [rank.exitcode for rank in ranks]


def _end_all_when_one_fails(ranks: list[multiprocessing.Process]) -> None:
    while alive := [rank for rank in ranks if rank.is_alive()]:
        multiprocessing.connection.wait([rank.sentinel for rank in alive])
        if any(rank.exitcode for rank in ranks):
            for rank in ranks:
                rank.join(5)
                rank.kill()
    for rank in ranks:
        rank.join()


def _rank(directory: Path, rank: int, world: int, port: int, save: bool, all_there) -> None:
    # Otherwise many ranks on two cores keep the servers of other tests from starting in time.
    os.nice(5)
    all_there.wait()
    log = os.open(directory / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update({**_place(rank, world, port), "TORCHELASTIC_USE_AGENT_STORE": "True"})
    faulthandler.dump_traceback_later(at_most(STUCK_SECONDS), exit=True)
    try:
        torch.set_num_threads(1)
        prepare_runtime()
        train_rank(directory, rank, save=save)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def train_rank(directory: Path, rank: int, *, save: bool) -> None:
    """Do one rank's part of the job in `directory`, and write down the values that it saw."""
    run = RunConfig.model_validate_json((directory / "run.json").read_text())
    with contextlib.ExitStack() as stack:
        if not save:
            stack.enter_context(patch.object(saver.dist_checkpointing, "save", _save_nothing))
        mesh = stack.enter_context(rank_mesh(run.execution.parallel, run.train.seed))
        if mesh.is_vision:
            served = set_up_vision_rank(run, mesh).serve().model_dump() if run.task == "train" else {}
            seen = {**served, "drift": 0.0}  # its weights are the owner's weights of the previous step
        else:
            seen = _train(run, mesh) if run.task == "train" else export(run, mesh).model_dump()
    (directory / f"rank-{rank}.json").write_text(json.dumps(seen))


class _NoFile:
    """The file writer of a rank that has nothing to write."""

    tensors = ()

    def write(self, *args: object) -> Written:
        return Written([], 0)


def _save_nothing(*args: object, sharded_strategy: OneFile, **kwargs: object) -> AsyncRequest:
    sharded_strategy.file = _NoFile()
    return AsyncRequest(None, (), [])


def _train(run: RunConfig, mesh: Mesh) -> dict[str, object]:
    trainers, batches, still_open = [], [], [0]
    set_up, read, backward_until = loop.set_up, BinReader.read, VisionWorker.backward_until

    def reading(reader, number):
        batch = read(reader, number)
        batches.append([len(batch.labels), batch.encoded_rows, len(batch.vision_cu_seqlens) - 1])
        return batch

    def setting_up(*args):
        trainers.append(set_up(*args))
        return trainers[0]

    def going_back(worker, last):
        still_open.append(len(worker._awaited))
        backward_until(worker, last)

    with contextlib.ExitStack() as stack:
        for place, name, function in (
            (loop, "set_up", setting_up),
            (BinReader, "read", reading),
            (VisionWorker, "backward_until", going_back),
        ):
            stack.enter_context(patch.object(place, name, function))
        loop.train(run, mesh)
    chunks = trainers[0].chunks
    # Ranks that divide the weights have no copies to compare, and are exported only from a checkpoint.
    divided = run.execution.parallel.sharding == "fsdp"
    if not divided:
        write_weights([chunk.module for chunk in chunks], mesh, run)
    return {
        "drift": 0.0 if divided else drift(chunks, mesh),
        "loss_tokens": [loss_tokens for loss_tokens, _, _ in batches],
        "encoded": [encoded for _, encoded, _ in batches],
        "layers": [layer.layer_number - 1 for chunk in chunks for layer in chunk.module.language.decoder.layers],
        "open": max(still_open),
        "pixels": any(patches for _, _, patches in batches),
    }


def drift(chunks, mesh: Mesh) -> float:
    """Return the largest difference between this rank's parameters and the copies on other ranks."""
    largest = 0.0
    for chunk in chunks:
        for param in chunk.module.parameters():
            groups = [mesh.groups.expt_dp if is_of_experts(param) else mesh.groups.dp_cp]
            if not getattr(param, "tensor_model_parallel", False):
                groups.append(mesh.groups.tp)
            if getattr(param, "shared_embedding", False):
                groups.append(mesh.groups.embd)
            for group in groups:
                copies = [torch.empty_like(param) for _ in range(group.size())]
                dist.all_gather(copies, param.detach().contiguous(), group=group)
                largest = max(largest, *(float((copy - param.detach()).abs().max()) for copy in copies))
    return largest
