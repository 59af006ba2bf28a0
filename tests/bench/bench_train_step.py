r"""Whole optimizer steps of the real trainer on published sizes: random weights, real loader, shards on disk.
transformers runs on the same samples in the same run.

    python -m tests.bench.bench_train_step --model qwen3_vl_2b --peer --peer-micro-batch 3 4 6
    python -m tests.bench.bench_train_step --model qwen3_vl_2b --no-ours --new-shapes 100
    python -m tests.bench.bench_train_step --model qwen3_vl_2b --gpus 4 --global-batch 32 --one-gpu --parallel '{}' \
        --parallel '{"tp": 2, "sequence_parallel": true}' --parallel '{"cp": 2}' --parallel '{"pp": 2}'
    python -m tests.bench.bench_train_step --model qwen3_vl_8b --adapter '{"rank": 16, "alpha": 32}' --peer
    python -m tests.bench.bench_train_step --tiny --peer --new-shapes 4        # everything, on a CPU, in a minute

Each part takes its time (guessed for H200s): the model half a minute (8B: two) and beside it 0.3 s a bin; a layout 45 s
to start (8B: 120), its steps of 2.5 to 5 s, the trace another 30 to 60 s; the peer 55 s a size at 2B, 80 s at 4B; 100
new shapes at 2B two minutes. The report (--out) is written anew after each part, so that a run that is cut short loses
little.

The trainer runs as it is (`-m trainer`'s own code, torchrun's environment as the launcher gives it); its counted steps
are untouched, and the steps after them are traced (tests/bench/traced_trainer.py) on rank 0, for a pipeline on the last
rank too. Tokens are counted without padding; FLOPs are the model's, vision and language, without padding
(trainer/data/flops.py). Samples are padded as the layout asks that divides them most.
"""

import argparse
import itertools
import os
import shlex
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from dataset_builders.contracts.bins import read_bins
from tests.bench.command import TINY_TRAINING, add_training, bench_folder, make_parser
from tests.bench.host import Host, apart
from tests.bench.mix import MODELS, pad_multiple_of, write_data, write_model
from tests.bench.peer import PeerPlan, measure_peer
from tests.bench.trace_parts import read_parts
from tests.bench.train_report import Measured, column_of_layout, report
from tests.bench.trainer_job import (
    Execution,
    TrainerEnded,
    await_steps,
    endless_training,
    start,
    train_steps,
    why,
    write_run,
)
from trainer.contract.adapter import AdapterConfig
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import RunConfig
from trainer.data.flops import training_cost
from trainer.data.order import bins_for_step
from trainer.model.adapters import adapted_layers
from trainer.model.registry import read_model
from trainer.plan.checks import pieces_of

WARM_BINS = 8  # steps before bins with new shapes
POLL_SECONDS = 0.1
TINY = {"warmup": 1, "peer_micro_batch": [2, 3], "peer_batch": 8, "peer_steps": 2, "peer_warmup": 1}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}


@dataclass(slots=True)
class Bench:
    """A run of the benchmark: its files, its arguments, and its measurements so far."""

    root: Path
    args: argparse.Namespace
    measured: Measured

    def attempt(self, name: str, part: Callable[[], None]) -> None:
        """Measure a part. A failure is put into the report, and the next part follows."""
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.measured.failed[name] = f"{type(error).__name__}: {error}"
        if self.args.out:
            self.args.out.write_text(report(self.measured))

    def add_layout(self, name: str, gpus: int, parallel: ParallelConfig, modules: str, cuda_graphs: bool) -> None:
        """Measure counted steps, then traced ones, in one job."""
        args = self.args
        share = args.global_batch * gpus // args.gpus
        execution = Execution(gpus=gpus, parallel=parallel, loader_workers=args.loader_workers)
        execution = execution.model_copy(update={"cuda_graphs": cuda_graphs, "modules": modules})
        train = endless_training(share, args.precision, args.moments, args.adapter)
        out = write_run(self.root, train, args.seq_len, execution)
        self.measured.pieces[name] = layers_of_pieces(out)
        counted = args.warmup + args.steps
        ranks = sorted({0, gpus - 1 if parallel.pp > 1 else 0}) if args.trace_steps else []
        traced = [str(counted + 2), str(args.trace_steps), ",".join(map(str, ranks))]
        bare = args.bare if modules in ("plain", "portable") else None
        with patch.dict(os.environ, {"PYTHONPATH": bare} if bare else {}):
            job = start(out, gpus, "tests.bench.traced_trainer", traced) if ranks else start(out, gpus)
        traces = {rank: out / f"trace-{rank}.json" for rank in ranks}
        rows = await_steps(out, job, counted, [path.name for path in traces.values()])
        self.measured.gpus[name], self.measured.rows[name] = gpus, rows[args.warmup - 1 :]
        rate = column_of_layout(self.measured, name)["useful tokens/s/GPU"]
        print(f"{name}: {rate:,.0f} useful tokens/s/GPU", flush=True)
        if not all(path.exists() for path in traces.values()):
            raise TrainerEnded(f"no trace: {why(out)}")
        self.measured.parts[name] = {rank: read_parts(path) for rank, path in traces.items()}
        for rank, path in traces.items() if args.traces else ():
            args.traces.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, args.traces / f"layout-{len(self.measured.rows)}-rank-{rank}.json")

    def add_new_shapes(self) -> None:
        """Measure steps of one bin, with every bin twice: once in the first epoch and once in the second. The first
        bins warm up."""
        args = self.args
        num_bins = len(read_bins(self.root / "bins", "train"))
        train = endless_training(1, args.precision, args.moments, args.adapter)
        execution = Execution(loader_workers=args.loader_workers)
        rows = train_steps(self.root, train, args.seq_len, 2 * num_bins, execution)
        first, again = {}, {}
        for step, row in enumerate(rows):
            (number,) = bins_for_step([num_bins], seed=train.seed, step=step, global_batch_size=1)
            (again if number in first else first)[number] = row.step_seconds
        new = list(first)[num_bins - args.new_shapes :]
        self.measured.new_shapes = [first[number] for number in new], [again[number] for number in new]

    def add_peer(self) -> None:
        """Measure transformers in a process of its own."""
        args = self.args
        plan = PeerPlan(
            micro_batches=tuple(sorted(args.peer_micro_batch)),
            global_batch=args.peer_batch,
            steps=args.peer_steps,
            warmup=args.peer_warmup,
            recompute=args.peer_recompute,
            seq_len=args.seq_len,
            dtype=DTYPES[args.precision],
            adapter=args.adapter,
            adapted=self.adapted_names(stacks=False),
            adapted_stacks=self.adapted_names(stacks=True),
        )
        self.measured.peer = apart(measure_peer, self.root, plan)

    def adapted_names(self, *, stacks: bool) -> tuple[str, ...]:
        """Return the names of transformers' modules that get adapters, or of its stacks of experts' matrices."""
        if self.args.adapter is None:
            return ()
        family, shape = read_model(self.root / "hf")
        layers = adapted_layers(family.weight_rules(shape), self.args.adapter)
        layers = [layer for layer in layers if bool(layer.rule.matrices) == stacks]
        return tuple(name for layer in layers for name, chosen in zip(layer.modules, layer.chosen) if chosen)


def run_bench(root: Path, args: argparse.Namespace, command: str) -> Measured:
    """Measure everything that was asked for. A process of its own writes the model while the data are written."""
    layouts = [(1, ParallelConfig())] if args.one_gpu else []
    layouts += [(args.gpus, ParallelConfig.model_validate_json(text)) for text in args.parallel or ["{}"]]
    num_bins = max(args.bins, args.new_shapes + WARM_BINS if args.new_shapes else 0)
    with ThreadPoolExecutor() as pool:
        written = pool.submit(apart, write_model, root / "hf", args.model)
        padding = pad_multiple_of(*(parallel for _, parallel in layouts))
        write = partial(write_data, model=args.model, pad_multiple=padding)
        mix = apart(write, root, num_bins, args.seq_len)
        written.result()
    while args.after and not args.after.exists():
        time.sleep(POLL_SECONDS)
    host = apart(Host.here)
    family, shape = read_model(root / "hf")
    cost = training_cost(shape, family, endless_training(1, args.precision, args.moments, args.adapter))
    bench = Bench(root, args, Measured(host=host, command=command, model=args.model, mix=mix, cost=cost))
    for gpus, parallel in [] if args.no_ours else layouts:
        for modules, cuda_graphs in itertools.product(args.modules, [True, False] if args.eager else [True]):
            name = name_of(gpus, parallel) + ("" if modules == "auto" else f", {modules}")
            name += "" if cuda_graphs else ", eager"
            bench.attempt(name, partial(bench.add_layout, name, gpus, parallel, modules, cuda_graphs))
    if args.new_shapes:
        bench.attempt("new shapes", bench.add_new_shapes)
    if args.peer:
        bench.attempt("transformers", bench.add_peer)
    return bench.measured


def layers_of_pieces(out: Path) -> list[int]:
    """Return the number of language layers of each piece of a job's pipeline."""
    run = RunConfig.model_validate_json((out / "run.json").read_text())
    return [len(piece) for piece in pieces_of(run, read_model(run.hf_dir, run.train)[1])]


def name_of(gpus: int, parallel: ParallelConfig) -> str:
    """Return the name of a layout, for example: tp 2, sequence_parallel, dp 2 (4 GPUs)."""
    given = [
        name if value is True else f"{name} {value}"
        for name, value in parallel.model_dump(exclude_defaults=True).items()
    ]
    dp = parallel.data_parallel(gpus)
    return ", ".join([*given, f"dp {dp}"]) + f" ({gpus} GPU{'s' if gpus > 1 else ''})"


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen3_vl_2b", help="a variant; NAME:4 has only four decoder layers")
    parser.add_argument("--tiny", action="store_true", help="other defaults, for a CPU")
    parser.add_argument("--dir", type=Path, help="where model, shards and runs are written; deleted at the end")
    parser.add_argument("--out", type=Path, help="the report, Markdown; written anew after each part")
    parser.add_argument("--after", type=Path, help="write model and data, then wait until this file exists")
    ours = parser.add_argument_group("this trainer")
    add_training(ours, DTYPES)
    ours.add_argument("--parallel", action="append", help="ParallelConfig as JSON; may be given several times")
    ours.add_argument("--one-gpu", action="store_true", help="also one GPU by itself with its share of the batch")
    ours.add_argument("--no-ours", action="store_true", help="only what else is asked for")
    ours.add_argument("--moments", choices=["float32", "bfloat16"], default="float32", help="AdamW's, as they are kept")
    ours.add_argument("--adapter", type=AdapterConfig.model_validate_json, help="as JSON; the peer then trains PEFT's")
    ours.add_argument("--warmup", type=int, default=3, help="steps before those that count")
    ours.add_argument("--trace-steps", type=int, default=1, help="steps traced after them; 0: none")
    ours.add_argument("--traces", type=Path, help="directory that gets the traces, some 100 MB each")
    ours.add_argument("--loader-workers", type=int, default=2, help="of each GPU")
    ours.add_argument("--modules", nargs="+", default=["auto"], help="sets of modules, each layout with each")
    ours.add_argument("--bare", help="PYTHONPATH of jobs with plain or portable modules: one without the engine")
    ours.add_argument("--eager", action="store_true", help="each layout also with language layers not as CUDA graphs")
    ours.add_argument("--new-shapes", type=int, default=0, help="bins never seen, against the same bins again; one GPU")
    peer = parser.add_argument_group("transformers, on one GPU")
    peer.add_argument("--peer", action="store_true")
    peer.add_argument("--peer-micro-batch", type=int, nargs="+", default=[3, 4, 6, 8], help="samples")
    peer.add_argument("--peer-batch", type=int, default=64, help="samples between two updates")
    peer.add_argument("--peer-steps", type=int, default=6, help="updates that count, at each size")
    peer.add_argument("--peer-warmup", type=int, default=2)
    peer.add_argument("--peer-recompute", action="store_true", help="transformers' own gradient checkpointing")
    if "--tiny" in argv:
        parser.set_defaults(**TINY_TRAINING, **TINY)
    args = parser.parse_args(argv)
    if args.model.partition(":")[0] not in MODELS:
        parser.error(f"--model {args.model}: known are {', '.join(MODELS)}")
    if args.global_batch % args.gpus or args.warmup < 1:
        parser.error("--global-batch must be a multiple of --gpus, --warmup at least 1")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    command = shlex.join(["python", "-m", "tests.bench.bench_train_step", *argv])
    with bench_folder(args.dir) as folder:
        print(report(run_bench(folder, args, command)))


if __name__ == "__main__":
    main(sys.argv[1:])
