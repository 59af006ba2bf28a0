r"""Peak memory of trainings on bins of unequal shapes, on device and host, against the estimate of `athanor plan`.

    python -m tests.bench.bench_plan_memory --dir /dev/shm --out memory.md 4b 8b-lora 27b-lora    # H200, nine minutes
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m tests.bench.bench_plan_memory --dir /dev/shm 4b 8b-lora
    python -m tests.bench.bench_plan_memory --dir /dev/shm 27b-float8 32b-float8   # peak of the host: 66 GB of files
    python -m tests.bench.bench_plan_memory tiny tiny-lora tiny-float8                        # a CPU, a minute

Random weights, written as fast as the memory takes them; the mix of bench_train_step, 8 steps of 2 bins by the trainer
as it is. Guessed for one H200: data 40 s (once a vocabulary), files 10 to 60 s, the start 30 to 90 s, steps 1 to 6 s
each. The table is printed anew after each case; a case that fails is a row that says so. --dir needs room for one model
at a time (27B: 56 GB, 32B: 67 GB) and 1 GB of data.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tests.bench.command import bench_folder, make_parser, print_report, table_head, table_row
from tests.bench.host import apart, describe
from tests.bench.memory import memory
from tests.bench.mix import MAX_PATCHES_PER_TOKEN, config_of, image_token, random_model, write_data
from tests.bench.trainer_job import Execution, TrainerEnded, await_steps, endless_training, start, write_run
from tests.helpers.large_model import write_large_model
from trainer.contract.adapter import AdapterConfig
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.loop import job
from trainer.loop import train as loop
from trainer.model.adapters import adapter_sizes
from trainer.model.registry import get_family
from trainer.plan.estimate import estimate_memory

PEAKS = "peaks.json"
STEPS, GLOBAL_BATCH = 8, 2
LORA = AdapterConfig(rank=16, alpha=32)
FLOAT8 = LORA.model_copy(update={"base": "float8"})
OF_EXPERTS = FLOAT8.model_copy(update={"targets": ("attention", "experts")})
PLAIN, AGAIN = ParallelConfig(), ParallelConfig(recompute="full", recompute_vision=True)


@dataclass(frozen=True, slots=True)
class Case:
    """A training to measure."""

    model: str
    adapter: AdapterConfig | None = None
    parallel: ParallelConfig = PLAIN
    seq_len: int = 8192
    precision: str = "bfloat16"
    cuda_graphs: bool = True

    @property
    def train(self) -> TrainConfig:
        return endless_training(GLOBAL_BATCH, self.precision, adapter=self.adapter)

    def planned(self) -> dict[str, int]:
        """Return the estimate of `athanor plan`, in bytes."""
        model, train = random_model(self.model), self.train
        family, shape = get_family(model.family), model.shape
        return estimate_memory(
            shape,
            self.parallel,
            train,
            pieces=(range(shape.language.num_layers),),
            dp=1,
            seq_len=self.seq_len,
            max_patches=MAX_PATCHES_PER_TOKEN * self.seq_len,
            adapters=adapter_sizes(train, family, shape),
        )


CASES = {
    "2b": Case("qwen3_vl_2b"),
    "4b": Case("qwen3_5_4b"),
    "4b-6144": Case("qwen3_5_4b", seq_len=6144),
    "4b-recomputed": Case("qwen3_5_4b", parallel=ParallelConfig(recompute_vision=True)),
    "8b-lora": Case("qwen3_vl_8b", LORA),
    "8b-lora-eager": Case("qwen3_vl_8b", LORA, cuda_graphs=False),
    "27b-lora": Case("qwen3_5_27b", LORA, AGAIN),
    "27b-float8": Case("qwen3_5_27b", FLOAT8, AGAIN),
    "32b-float8": Case("qwen3_vl_32b", FLOAT8, AGAIN),
    "30b-a3b-float8": Case("qwen3_vl_30b_a3b", OF_EXPERTS, AGAIN),
    "35b-a3b-float8": Case("qwen3_5_35b_a3b", OF_EXPERTS, AGAIN),
    "tiny": Case("qwen3_vl_tiny", seq_len=256, precision="float32"),
    "tiny-lora": Case("qwen3_5_tiny", LORA, seq_len=256, precision="float32"),
    "tiny-float8": Case("qwen3_vl_tiny", FLOAT8, AGAIN, seq_len=256, precision="float32"),
    "tiny-experts": Case("qwen3_vl_moe_tiny", OF_EXPERTS, AGAIN, seq_len=256, precision="float32"),
}
NUMBERS = ["allocated", "reserved", "plan", "of it reserve", "start", "reserved over plan", "host", "files"]


def measure(root: Path, case: Case) -> list[str]:
    """Return the cells of a case: GB of the device and of the host, peaks of the whole process."""
    shutil.rmtree(root / "hf", ignore_errors=True)
    with ThreadPoolExecutor() as pool:
        written = pool.submit(write_large_model, root / "hf", config_of(case.model))
        data = root / f"data-{case.seq_len}-{image_token(case.model)}"
        if not data.is_dir():
            apart(partial(write_data, model=case.model), data, STEPS * GLOBAL_BATCH, case.seq_len)
        parameters = written.result()
    for name in ("data", "bins"):
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(data / name)
    files = sum(path.stat().st_size for path in (root / "hf").iterdir())
    print(f"{time.strftime('%H:%M:%S')} {case.model}: {parameters / 1e9:.2f} B parameters written", flush=True)
    execution = Execution(parallel=case.parallel, cuda_graphs=case.cuda_graphs)
    out = write_run(root, case.train, case.seq_len, execution)
    await_steps(out, start(out, 1, "tests.bench.bench_plan_memory"), STEPS)
    peaks, plan = json.loads((out / PEAKS).read_text()), case.planned()
    what = "whole" if case.adapter is None else f"LoRA {case.adapter.rank}, base in {case.adapter.base}"
    cells = [f"{case.model}, {what}", *(f"{peaks[name] / 1e9:.1f}" for name in ("allocated", "reserved"))]
    total = sum(plan.values())
    cells += [f"{bytes_ / 1e9:.1f}" for bytes_ in (total, plan["reserve"], plan.get("start", 0))]
    return [*cells, f"{peaks['reserved'] / total:.3f}", f"{peaks['host'] / 1e9:.2f}", f"{files / 1e9:.1f}"]


def run_rank(run_json: Path) -> int:
    """Run the trainer, which writes its peaks into the directory of run.json after each step."""
    train_step, peaks = loop.train_step, run_json.parent / PEAKS

    def measured(*args: object, **kwargs: object) -> object:
        result = train_step(*args, **kwargs)
        cuda = torch.cuda.is_available()
        device = {
            "allocated": torch.cuda.max_memory_allocated() if cuda else 0,
            "reserved": torch.cuda.max_memory_reserved() if cuda else 0,
        }
        peaks.with_suffix(".new").write_text(json.dumps({**device, "host": memory()}))
        os.replace(peaks.with_suffix(".new"), peaks)
        return result

    loop.train_step = measured
    return job.run_file(run_json)


def main(argv: Sequence[str]) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--dir", type=Path, help="where model and data are written; deleted at the end")
    parser.add_argument("--out", type=Path, help="gets the table, anew after each case")
    args = parser.parse_args(argv)
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "torch's default")
    title = f"GB, decimal. {'; '.join(describe())}. Allocator: {allocator}. {STEPS} steps of {GLOBAL_BATCH} bins."
    lines = [title, "", table_head(["case", "model, trained"], NUMBERS)]
    with bench_folder(args.dir) as folder:
        for name in args.cases:
            try:
                cells = measure(folder, CASES[name])
            except TrainerEnded as error:
                plan = sum(CASES[name].planned().values()) / 1e9
                why = " ".join(str(error).split())[:300]
                cells = [f"{CASES[name].model}: {why}", "-", "-", f"{plan:.1f}", *["-"] * 5]
            lines.append(table_row([name, *cells]))
            print_report("\n".join(lines), args.out)
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith("run.json"):
        sys.exit(run_rank(Path(sys.argv[1])))
    sys.exit(main(sys.argv[1:]))
