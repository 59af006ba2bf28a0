"""One job of the trainer, from run.json to result.json."""

import logging
import platform
import sys
import traceback
import warnings
from pathlib import Path

import torch
from pydantic import ValidationError

from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.files import write_json
from trainer.contract.names import EXIT_FAILED, EXIT_INPUT, EXIT_STOPPED, RESULT_JSON
from trainer.contract.result import TrainResult
from trainer.contract.run import EncodeRun, RunConfig, parse_run
from trainer.plan.checks import check_run

# megatron-core warns at import about everything that a machine without CUDA lacks; the module sets handle that.
warnings.filterwarnings("ignore", module=r"megatron\..*")
if not torch.cuda.is_available():
    # megatron-core takes the Adam of Transformer Engine, or else of Apex, wherever it can import it, as on a login node
    # of a cluster. Their kernels need a GPU. An entry of None makes the import fail.
    sys.modules |= dict.fromkeys(("transformer_engine", "apex", "amp_C"))

from trainer.libraries.megatron_private import prepare_runtime  # noqa: E402
from trainer.loop.encode_images import encode  # noqa: E402
from trainer.loop.export import export  # noqa: E402
from trainer.loop.set_up import set_up_vision_rank  # noqa: E402
from trainer.loop.train import NotFinite, train  # noqa: E402
from trainer.model.registry import read_model  # noqa: E402
from trainer.parallel.mesh import place_in_world, rank_mesh, set_threads  # noqa: E402

log = logging.getLogger("athanor.trainer")


def run_file(path: Path) -> int:
    """Run the job of a run.json and return the exit code of the process."""
    try:
        run = parse_run(path.read_text())
    except ValidationError as error:
        first = error.errors()[0]
        print(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}", file=sys.stderr)
        return EXIT_INPUT
    rank = place_in_world()[0]
    # Only rank 0 tells what it does; every rank tells what is wrong.
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    set_threads(run.num_threads)
    prepare_runtime()
    result = run_job(run)
    # A rank that failed may be the only one that knows why, so it writes the result too.
    if rank == 0 or result.status == "failed":
        write_result(run, result)
    if result.status == "failed":
        return EXIT_INPUT if result.is_input_error else EXIT_FAILED
    return EXIT_STOPPED if result.status == "stopped" else 0


def run_job(run: RunConfig | EncodeRun) -> TrainResult:
    """Run the job in the process group and return its result. A failure becomes a result with its reason."""
    rank, _, world = place_in_world()
    here = f"rank {rank} on {platform.node()}"

    def on_lost(line: str) -> None:
        """Write the result before this process ends, because another rank is gone: called in the watch's thread."""
        write_result(run, _failed(f"{here} {line}, whose log says why if it could"))

    try:
        if run.task == "train":
            check_run(run, world, *read_model(run.hf_dir, run.train))
        seed = 0 if run.task == "encode" else run.train.seed
        with rank_mesh(run.execution.parallel, seed, on_lost) as mesh:
            if mesh.is_vision:
                # An export or an encoding needs no ranks that only encode images for a training.
                serves = run.task == "train"
                return set_up_vision_rank(run, mesh).serve() if serves else TrainResult(status="finished", step=0)
            return {"train": train, "export": export, "encode": encode}[run.task](run, mesh)
    except NotFinite as error:
        return TrainResult(status="failed", step=error.step, message=str(error), keys=error.keys)
    except InputError as error:
        return _failed(str(error), is_input_error=True)
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        return _failed(
            f"{here}: the GPU's memory is full ({one_line(error)}); lower plan_bins.seq_len and plan_bins.max_patches "
            "together, or set execution.parallel.recompute_vision=true, then recompute=full"
        )
    except Exception as error:
        traceback.print_exc()
        return _failed(f"{here}: {type(error).__name__}: {error}")


def _failed(message: str, *, is_input_error: bool = False) -> TrainResult:
    return TrainResult(status="failed", step=0, message=message, is_input_error=is_input_error)


def write_result(run: RunConfig | EncodeRun, result: TrainResult) -> None:
    """Write result.json, and a failure's message into the log."""
    write_json(run.output_dir / RESULT_JSON, result.model_dump(mode="json"))
    if result.status == "failed":
        log.error("%s", result.message)
