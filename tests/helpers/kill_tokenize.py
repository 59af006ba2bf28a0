"""A script for the kill -9 test of tokenize and plan_bins: python -m tests.helpers.kill_tokenize DIRECTORY."""

import sys
from pathlib import Path

import torch

from stages.plan_bins.stage import STAGE as PLAN_BINS
from stages.plan_bins.stage import PlanBinsConfig
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.tokenize.stage import STAGE as TOKENIZE
from stages.tokenize.stage import TokenizeConfig
from tests.helpers.kill import kill_and_rerun, print_result
from tests.helpers.samples import make_sample, make_samples_artifact
from tests.helpers.tiny_model import tiny_hf_dir


def main(directory: Path, every: int) -> None:
    torch.set_num_threads(1)  # a fork copies no threads, so none may be running
    shards = {f"train/shard-{i:05d}.tar": [make_sample(4 * i + j) for j in range(4)] for i in range(2)}
    shards["heldout/shard-00000.tar"] = [make_sample(100 + j) for j in range(3)]
    inputs = {
        "samples": make_samples_artifact(directory / "samples", shards),
        "processor": processor_input(ModelDirectory(tiny_hf_dir())),
    }
    tokenize = TokenizeConfig(max_seq_len=80, max_pixels=None, max_skip_fraction=1.0)

    def run_tokenize(root: Path) -> Path:
        return run_stage(TOKENIZE, tokenize, inputs, root).artifact.dir

    tokenized = run_stage(TOKENIZE, tokenize, inputs, directory / "for-bins").artifact
    plan = PlanBinsConfig(seq_len=128, max_patches=512, pad_multiple=8)

    def run_plan_bins(root: Path) -> Path:
        return run_stage(PLAN_BINS, plan, {"tokenized": tokenized}, root).artifact.dir

    print_result(
        {
            "tokenize": kill_and_rerun(run_tokenize, directory / "tokenize", 5 * every),
            "plan_bins": kill_and_rerun(run_plan_bins, directory / "plan_bins", 2 * every),
        }
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
