"""A script that kills -9 the data stages and runs them again.

python -m tests.helpers.kill_data_stages HOW SOURCE HF_DIR ROOT, where HOW is `random`: convert and tokenize are each
killed three times at random moments, then plan_bins runs; or `each`: all three are killed at moments of every kind.
"""

import sys
from pathlib import Path

import torch

from tests.helpers.data_stages import run_all, run_convert, run_plan_bins, run_tokenize
from tests.helpers.kill import kill_and_rerun, kill_at_random, print_result


def at_random(source: Path, hf_dir: Path, root: Path) -> dict[str, object]:
    in_convert = kill_at_random(lambda to: run_convert(source, to), root, kills=3, seed=1)
    (samples,) = (root / "artifacts" / "convert").iterdir()
    in_tokenize = kill_at_random(lambda to: run_tokenize(samples, hf_dir, to), root, kills=3, seed=1)
    run_all(source, hf_dir, root)
    return {"convert": in_convert, "tokenize": in_tokenize}


def at_each_kind_of_moment(source: Path, hf_dir: Path, root: Path) -> dict[str, object]:
    samples = run_convert(source, root / "whole")
    tokenized = run_tokenize(samples, hf_dir, root / "whole")
    stages = {
        "convert": (lambda to: run_convert(source, to), 3),
        "tokenize": (lambda to: run_tokenize(samples, hf_dir, to), 5),
        "plan_bins": (lambda to: run_plan_bins(tokenized, to), 2),
    }
    return {name: kill_and_rerun(run, root / name, every) for name, (run, every) in stages.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)  # a fork copies no threads, so none may be running
    how = {"random": at_random, "each": at_each_kind_of_moment}[sys.argv[1]]
    print_result(how(*map(Path, sys.argv[2:])))
