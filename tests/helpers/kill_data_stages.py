"""A script: convert and tokenize, each killed three times at random moments, then plan_bins.

python -m tests.helpers.kill_data_stages SOURCE HF_DIR ROOT SEED
"""

import sys
from pathlib import Path

import torch

from tests.helpers.data_stages import run_all, run_convert, run_tokenize
from tests.helpers.kill import kill_at_random, print_result


def main(source: Path, hf_dir: Path, root: Path, seed: int) -> None:
    torch.set_num_threads(1)  # a fork copies no threads, so none may be running
    in_convert = kill_at_random(lambda to: run_convert(source, to), root, kills=3, seed=seed)
    (samples,) = (root / "artifacts" / "convert").iterdir()
    in_tokenize = kill_at_random(lambda to: run_tokenize(samples, hf_dir, to), root, kills=3, seed=seed)
    run_all(source, hf_dir, root)
    print_result({"convert": in_convert, "tokenize": in_tokenize})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
