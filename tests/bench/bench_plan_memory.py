r"""Peak memory of trainings on bins of unequal shapes, on device and host, against the estimate of `athanor plan`.

    python -m tests.bench.bench_plan_memory --dir /dev/shm --out memory.md 4b 8b-lora 27b-lora    # H200, nine minutes
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python -m tests.bench.bench_plan_memory --dir /dev/shm 4b 8b-lora
    python -m tests.bench.bench_plan_memory --dir /dev/shm 27b-float8 32b-float8   # peak of the host: 66 GB of files
    python -m tests.bench.bench_plan_memory --dir /dev/shm --by-place 2b           # also who holds what
    python -m tests.bench.bench_plan_memory tiny tiny-lora tiny-float8                        # a CPU, a minute

Random weights, written as fast as the memory takes them; the mix of bench_train_step, 8 steps of 2 bins by the trainer
as it is. Guessed for one H200: data 40 s (once a vocabulary), files 10 to 60 s, the start 30 to 90 s, steps 1 to 6 s
each. The table is printed anew after each case; a case that fails is a row that says so. --dir needs room for one model
at a time (27B: 56 GB, 32B: 67 GB) and 1 GB of data.

--by-place adds a table of what is allocated when the backward pass of the last step begins, by the lines of the trainer
that allocated it. It slows the steps down, not their memory.
"""

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
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
from trainer.layers.decoder import LanguageModel
from trainer.loop import job
from trainer.loop import train as loop
from trainer.model.adapters import adapter_sizes
from trainer.model.registry import get_family
from trainer.plan.estimate import estimate_memory

PEAKS, PLACES = "peaks.json", "places.json"
LINES = 40  # of the table of places
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
    "100m": Case("qwen3_vl_100m", seq_len=32_768),
    "100m-16384": Case("qwen3_vl_100m", seq_len=16_384),
    "2b": Case("qwen3_vl_2b"),
    "2b-4096": Case("qwen3_vl_2b", seq_len=4096),
    "2b-16384": Case("qwen3_vl_2b", seq_len=16_384),
    "2b-recomputed": Case("qwen3_vl_2b", parallel=AGAIN),
    "2b-vision-recomputed": Case("qwen3_vl_2b", parallel=ParallelConfig(recompute_vision=True)),
    "2b-lora": Case("qwen3_vl_2b", LORA),
    "2b-lora-4096": Case("qwen3_vl_2b", LORA, seq_len=4096),
    "qwen3.5-2b": Case("qwen3_5_2b"),
    "qwen3.5-2b-4096": Case("qwen3_5_2b", seq_len=4096),
    "4b-lora": Case("qwen3_vl_4b", LORA, AGAIN),
    "8b-lora-6144": Case("qwen3_vl_8b", LORA, seq_len=6144),
    "30b-a3b:4": Case("qwen3_vl_30b_a3b:4"),
    "30b-a3b:4-4096": Case("qwen3_vl_30b_a3b:4", seq_len=4096),
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


def measure(root: Path, case: Case, by_place: bool) -> tuple[list[str], dict[str, int]]:
    """Return the cells of a case, GB of the device and of the host, peaks of the whole process; and the bytes of each
    place, if they are asked for."""
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
    await_steps(out, start(out, 1, "tests.bench.bench_plan_memory", ["by-place"] * by_place), STEPS)
    places = json.loads((out / PLACES).read_text()) if by_place else {}
    peaks, plan = json.loads((out / PEAKS).read_text()), case.planned()
    what = "whole" if case.adapter is None else f"LoRA {case.adapter.rank}, base in {case.adapter.base}"
    cells = [f"{case.model}, {what}", *(f"{peaks[name] / 1e9:.1f}" for name in ("allocated", "reserved"))]
    total = sum(plan.values())
    cells += [f"{bytes_ / 1e9:.1f}" for bytes_ in (total, plan["reserve"], plan.get("start", 0))]
    cells += [f"{peaks['reserved'] / total:.3f}", f"{peaks['host'] / 1e9:.2f}", f"{files / 1e9:.1f}"]
    return cells, places


def watch_places(path: Path) -> None:
    """From now on torch notes who allocates what; the backward pass of the last step writes the sums."""
    torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
    losses, calls = LanguageModel.losses, count(1)

    def write(_: torch.Tensor) -> None:
        path.write_text(json.dumps(allocated_by_place()))

    def watched(self: LanguageModel, hidden: torch.Tensor, *args: object) -> torch.Tensor:
        if hidden.requires_grad and next(calls) == (STEPS - 1) * GLOBAL_BATCH + 1:
            hidden.register_hook(write)
        return losses(self, hidden, *args)

    LanguageModel.losses = watched


def allocated_by_place() -> dict[str, int]:
    """Return the allocated bytes by the innermost line of the trainer that allocated them and the one that called it,
    and the bytes that are reserved and not allocated."""
    sums: Counter[str] = Counter()
    for segment in torch.cuda.memory._snapshot()["segments"]:
        for block in segment["blocks"]:
            frames = [x for x in block.get("frames", ()) if "/trainer/" in x["filename"]]
            lines = [f"{x['filename'].rpartition('/trainer/')[2]}:{x['line']} {x['name']}" for x in frames[:2]]
            is_held = block["state"] == "active_allocated"
            pool = "reserved by graphs" if any(segment["segment_pool_id"]) else "reserved"
            sums[" < ".join(lines) if is_held else pool] += block["size"]
    return dict(sums.most_common())


def run_rank(run_json: Path, *by_place: str) -> int:
    """Run the trainer, which writes its peaks into the directory of run.json after each step."""
    train_step, peaks = loop.train_step, run_json.parent / PEAKS
    if by_place:
        watch_places(run_json.with_name(PLACES))

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
    parser.add_argument("--by-place", action="store_true", help="who holds what, by lines of the trainer")
    args = parser.parse_args(argv)
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "torch's default")
    title = f"GB, decimal. {'; '.join(describe())}. Allocator: {allocator}. {STEPS} steps of {GLOBAL_BATCH} bins."
    lines = [title, "", table_head(["case", "model, trained"], NUMBERS)]
    tables: list[str] = []
    with bench_folder(args.dir) as folder:
        for name in args.cases:
            places = {}
            try:
                cells, places = measure(folder, CASES[name], args.by_place)
            except TrainerEnded as error:
                plan = sum(CASES[name].planned().values()) / 1e9
                why = " ".join(str(error).split())[:300]
                cells = [f"{CASES[name].model}: {why}", "-", "-", f"{plan:.1f}", *["-"] * 5]
            lines.append(table_row([name, *cells]))
            largest = [table_row([f"{size / 1e9:.3f}", f"`{place}`"]) for place, size in [*places.items()][:LINES]]
            tables += ["", f"GB of {name}:", "", *largest] if places else []
            print_report("\n".join(lines + tables), args.out)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith("run.json"):
        sys.exit(run_rank(Path(sys.argv[1]), *sys.argv[2:]))
    sys.exit(main(sys.argv[1:]))
