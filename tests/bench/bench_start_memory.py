"""Peak memory of each rank's process at the start of a training by FSDP2, against a start with the whole model first.

    python -m tests.bench.bench_start_memory [--layers 38]      # two processes of a CPU, or two GPUs; 2.4 GB of disk

A Qwen3 of random weights, float32; 38 layers are 598 million parameters. No step is trained: `set_up` alone, with
everything that it makes. Two ways: each rank its share (as the trainer does), and the whole model divided afterwards
(as it did).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import torch

from tests.bench.command import bench_folder, make_parser, table_head, table_row
from tests.bench.memory import memory
from tests.helpers.large_model import write_large_model
from tests.helpers.run_dir import changed, make_bins, write_job
from tests.helpers.tiny_text_model import text_config
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import RunConfig
from trainer.libraries.megatron_private import prepare_runtime
from trainer.loop import set_up
from trainer.parallel.mesh import place_in_world, rank_mesh

RANKS = 2
SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}


def run_rank(path: Path, *, whole: bool) -> None:
    """Start the training of a run.json, and write down the memory that it took."""
    run = RunConfig.model_validate_json(path.read_text())
    prepare_runtime()
    build, before = set_up.build_chunks, memory("VmRSS") / 1e9
    with rank_mesh(run.execution.parallel, run.train.seed) as mesh:
        # Without `is_empty` the whole model is in memory before it is divided.
        way = (lambda *args, is_empty: build(*args)) if whole else build
        with patch.object(set_up, "build_chunks", way):
            trainer = set_up.set_up(run, mesh)
        held = sum(piece.numel() * 4 for piece in trainer.chunks[0].slices.values()) / 1e9
        sizes = {"before": before, "peak": memory() / 1e9, "after": memory("VmRSS") / 1e9, "share": held}
        if torch.cuda.is_available():
            sizes |= {"device": torch.cuda.max_memory_allocated() / 1e9}
    path.with_name(f"peak-{place_in_world()[0]}.json").write_text(json.dumps(sizes))


def peaks_of(run: RunConfig, *, whole: bool = False) -> list[dict[str, float]]:
    """Return the GB of each rank: host memory before, at its peak and after, its share of the weights, and the peak of
    its GPU."""
    path = run.output_dir / "run.json"
    path.write_text(run.model_dump_json())
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    torchrun.append(f"--nproc-per-node={RANKS}")
    module = ["-m", "tests.bench.bench_start_memory", "--rank", str(path), *(["--whole"] if whole else [])]
    subprocess.run([*torchrun, *module], check=True)
    return [json.loads(path.with_name(f"peak-{rank}.json").read_text()) for rank in range(RANKS)]


def large_job(root: Path, layers: int) -> RunConfig:
    """Return a training by FSDP2 of a model with this number of layers."""
    write_large_model(root / "hf", text_config("first", **SIZES, num_hidden_layers=layers, head_dim=128))
    parallel = ParallelConfig(sharding="fsdp")
    run = write_job(root, num_steps=3, shape="text-first", bins=make_bins("text-first"), parallel=parallel)
    return changed(run, hf_dir=root / "hf")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=38)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank, whole=args.whole)
        return
    columns = ["before", "at most", "after", "its share of the weights"]
    print(table_head(["GB of a process"], columns + ["at most on its GPU"] * torch.cuda.is_available()))
    with bench_folder() as folder:
        run = large_job(folder, args.layers)
        for name, whole in (("each rank its share", False), ("the whole model first", True)):
            for rank, sizes in enumerate(peaks_of(run, whole=whole)):
                print(table_row([f"{name}, rank {rank}", *(f"{size:.2f}" for size in sizes.values())]), flush=True)


if __name__ == "__main__":
    main()
