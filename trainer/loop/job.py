"""One job of the trainer, from run.json to result.json; or several trainings of adapters over one base."""

import contextlib
import gc
import logging
import platform
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import ValidationError

from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.files import write_json
from trainer.contract.answer import TrainResult
from trainer.contract.names import EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED, RESULT_JSON, TRAINER_LOG
from trainer.contract.run import EncodeRun, RunConfig, SharedBaseRun, parse_run
from trainer.plan.checks import check_run
from trainer.plan.sharing import check_sharing

# megatron-core warns at import about everything that a machine without CUDA lacks; the module sets handle that.
warnings.filterwarnings("ignore", module=r"megatron\..*")
if not torch.cuda.is_available():
    # megatron-core takes the Adam of Transformer Engine, or else of Apex, wherever it can import it, as on a login node
    # of a cluster. Their kernels need a GPU. An entry of None makes the import fail.
    sys.modules |= dict.fromkeys(("transformer_engine", "apex", "amp_C"))

from trainer.image_features.encode import encode  # noqa: E402
from trainer.loop.export import export  # noqa: E402
from trainer.loop.interval import NotFinite  # noqa: E402
from trainer.loop.set_up import load_base, set_up_vision_rank  # noqa: E402
from trainer.loop.train import train  # noqa: E402
from trainer.parallel.mesh import place_in_world, rank_mesh, seed_rank, set_threads  # noqa: E402
from trainer.parallel.runtime import prepare_runtime  # noqa: E402

log = logging.getLogger("athanor.trainer")
T = TypeVar("T")
_FORMAT = {"format": "%(asctime)s %(message)s", "datefmt": "%H:%M:%S"}


def run_job(run: RunConfig | EncodeRun) -> TrainResult:
    """Run the job in the process group and return its result. A failure becomes a result with its reason."""
    world = place_in_world()[2]

    def work() -> TrainResult:
        if run.task == "train":
            check_run(run, world)
        seed = 0 if run.task == "encode" else run.train.seed
        with rank_mesh(run.execution.parallel, seed, lambda line: write_result(run, _lost(line))) as mesh:
            if mesh.is_vision:
                serves = run.task == "train"
                return set_up_vision_rank(run, mesh).serve() if serves else TrainResult(status="finished", step=0)
            return {"train": train, "export": export, "encode": encode}[run.task](run, mesh)

    return _result_of(work)


def run_together(runs: Sequence[RunConfig]) -> list[TrainResult]:
    """Train the adapters of several runs in the process group, one run after the other, over a base that is loaded
    once. Write each result when its run ends.

    A run whose gradient is not finite does not end the others. Any other failure does, because other ranks may not have
    had it, and so does SIGTERM.

    Returns:
        a result for each run that has begun.
    """
    rank, _, world = place_in_world()
    results: list[TrainResult] = []

    def end(result: TrainResult) -> None:
        if len(results) < len(runs):
            report(runs[len(results)], result, rank)
            results.append(result)

    def work() -> None:
        check_sharing(runs)
        fresh = torch.get_rng_state()  # a process of its own begins with it
        first = runs[0]
        with rank_mesh(first.execution.parallel, first.train.seed, lambda line: end(_lost(line))) as mesh:
            base = load_base(first, mesh)
            for run in runs:
                log.info("run %d of %d over this base: %s", len(results) + 1, len(runs), run.output_dir)
                torch.set_rng_state(fresh)
                seed_rank(run.train.seed)
                with _own_log(run) if run is not first and rank == 0 else contextlib.nullcontext():
                    check_run(run, world)
                    end(_finite(lambda run=run: train(run, mesh, base)))
                gc.collect()  # the modules and the optimizer of the run refer to each other
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                if mesh.any(base.stop.has_come)[0]:
                    break

    failure = _result_of(work)
    if failure is not None:
        end(failure)
    return results


@contextlib.contextmanager
def _own_log(run: RunConfig) -> Iterator[None]:
    """Write the trainer's messages also to the log of a run whose process has another run's log."""
    path = run.output_dir / TRAINER_LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, mode="w", encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT["format"], _FORMAT["datefmt"]))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


def _finite(work: Callable[[], T]) -> T | TrainResult:
    """Return what the work returns. If a gradient is not finite, which all ranks see at the same step, return that."""
    try:
        return work()
    except NotFinite as error:
        return TrainResult(status="failed", step=error.step, message=str(error), keys=error.keys)


def _result_of(work: Callable[[], T]) -> T | TrainResult:
    """Return what the work of a job returns; a failure becomes a result with its reason."""
    rank = place_in_world()[0]
    try:
        return _finite(work)
    except InputError as error:
        return _failed(str(error), is_input_error=True)
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        return _failed(
            f"rank {rank} on {platform.node()}: the GPU's memory is full ({one_line(error)}); lower plan_bins.seq_len "
            "and plan_bins.max_patches together, or set execution.parallel.recompute_vision=true, then recompute=full"
        )
    except Exception as error:
        traceback.print_exc()
        return _failed(f"rank {rank} on {platform.node()}: {type(error).__name__}: {error}")


def _lost(line: str) -> TrainResult:
    return _failed(f"rank {place_in_world()[0]} on {platform.node()} {line}, whose log says why if it could")


def _failed(message: str, *, is_input_error: bool = False) -> TrainResult:
    return TrainResult(status="failed", step=0, message=message, is_input_error=is_input_error)


def write_result(run: RunConfig | EncodeRun, result: TrainResult) -> None:
    """Write result.json, and a failure's message into the log."""
    write_json(run.output_dir / RESULT_JSON, result.model_dump(mode="json"))
    if result.status == "failed":
        log.error("%s", result.message)


def report(run: RunConfig | EncodeRun, result: TrainResult, rank: int) -> None:
    """Write a result on the rank that has to: rank 0, and each rank that failed."""
    if rank == 0 or result.status == "failed":
        write_result(run, result)


def run_file(path: Path) -> int:
    """Run the job of a run.json and return the exit code of the process. Of several runs it is that of the first
    which has not finished."""
    try:
        runs = [parse_run(path.read_text())]
        if isinstance(runs[0], SharedBaseRun):
            runs = [parse_run((path := member).read_text()) for member in runs[0].runs]
    except ValidationError as error:
        first = error.errors()[0]
        print(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}", file=sys.stderr)
        return EXIT_INPUT
    rank = place_in_world()[0]
    logging.basicConfig(level=logging.WARNING, **_FORMAT)
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    set_threads(runs[0].num_threads)
    prepare_runtime()
    if len(runs) > 1:
        return next((code for result in run_together(runs) if (code := exit_code(result))), 0)
    result = run_job(runs[0])
    report(runs[0], result, rank)
    return exit_code(result)


def exit_code(result: TrainResult) -> int:
    """Return the exit code of a process whose job ended so."""
    if result.status == "failed":
        return EXIT_INPUT if result.is_input_error else EXIT_FAILED
    return EXIT_STOPPED if result.status == "stopped" else 0
