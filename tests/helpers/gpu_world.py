"""Several jobs, one after the other, in the processes of one torchrun, since CUDA does not survive a fork and imports
are slow."""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from tests.helpers.world import World, train_rank, world_of
from trainer.contract.run import RunConfig
from trainer.libraries.megatron_private import prepare_runtime
from trainer.parallel import mesh as distributed


def run_worlds(root: Path, jobs: dict[str, tuple[RunConfig, int]], *, save: bool = False) -> dict[str, World | str]:
    """Train each job in a world of its size. Return its results, or the end of its log if it failed."""
    gpus = max(processes for _, processes in jobs.values())
    for run, _ in jobs.values():
        (run.output_dir / "run.json").write_text(run.model_dump_json())
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={gpus}", "-m", "tests.helpers.gpu_world", str(root / "jobs.json")]
    env = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    log = root / "worlds.log"
    waiting = list(jobs.values())
    while waiting:  # a failing job with several ranks also ends the processes of the other ranks
        (root / "jobs.json").write_text(json.dumps([[str(run.output_dir), n, save] for run, n in waiting]))
        with log.open("w") as file:
            subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
        left = [(run, n) for run, n in waiting if not _is_whole(run, n) and not any(run.output_dir.glob("error-*.txt"))]
        if len(left) == len(waiting):
            break
        waiting = left
    found = {}
    for name, (run, processes) in jobs.items():
        errors = "\n".join(path.read_text()[-2000:] for path in sorted(run.output_dir.glob("error-*.txt")))
        found[name] = world_of(run, processes) if _is_whole(run, processes) else errors or log.read_text()[-2000:]
    return found


def _is_whole(run: RunConfig, processes: int) -> bool:
    return all((run.output_dir / f"rank-{rank}.json").is_file() for rank in range(processes))


def main(plan: Path) -> None:
    """Run this rank's part of every job whose world includes this rank."""
    prepare_runtime()
    rank = distributed.place_in_world()[0]
    for directory, processes, save in json.loads(plan.read_text()):
        if rank < processes:
            _do(Path(directory), rank, processes, save)


def _do(directory: Path, rank: int, processes: int, save: bool) -> None:
    def join(rank: int, world: int, backend: str) -> None:
        # Each job has a store of its own. Otherwise keys of an earlier process group would be mistaken for its keys.
        store = dist.FileStore(str(directory / "store"), world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)

    def meet(*_: object, **__: object):
        yield dist.FileStore(str(directory / "bridge"), processes), rank, processes

    place = patch.object(distributed, "place_in_world", lambda: (rank, rank, processes))
    with place, patch.object(distributed, "_join", join), patch.object(dist, "rendezvous", meet):
        try:
            train_rank(directory, rank, save=save)
        except Exception:
            (directory / f"error-{rank}.txt").write_text(traceback.format_exc())
            if processes > 1:
                raise  # the other ranks wait in a collective, and torchrun ends them


if __name__ == "__main__":
    main(Path(sys.argv[1]))
