"""`torchrun -m trainer run.json`: parse one path, build, run, write result.json.

Exit codes: 0 finished, 2 the config or an input is wrong, 75 stopped on request after saving, 1 any other failure.
"""

import argparse
import faulthandler
import os
import sys
from pathlib import Path


def parse_args(argv: list[str]) -> Path:
    parser = argparse.ArgumentParser(prog="torchrun -m trainer")
    parser.add_argument("run_json", type=Path, help="a RunConfig or EncodeRun, written by a stage")
    return parser.parse_args(argv).run_json


if __name__ == "__main__":
    # Imported here, because a process that is spawned from this one loads this module and does not need the job.
    from trainer.loop.job import run_file

    faulthandler.enable()  # where each thread was, if a rank is aborted: by NCCL's watchdog after a hang, or by hand
    os.umask(0o077)  # only its owner may read a root; set here because on a cluster no flow is the parent process
    sys.exit(run_file(parse_args(sys.argv[1:])))
