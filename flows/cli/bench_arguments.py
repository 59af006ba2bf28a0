"""The arguments of `athanor bench`."""

import argparse
from pathlib import Path


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `athanor bench`."""
    parser.add_argument("model", help="directory of a run's model, as `run` prints it; or any model directory or name")
    parser.add_argument(
        "--tasks",
        default="heldout",
        metavar="T1,T2",
        help="tasks of lmms-eval; heldout: the held-out questions of the run (default: %(default)s)",
    )
    parser.add_argument(
        "--before", metavar="DIR_OR_NAME", help="model before training (default: the one that the run started from)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="ask only the first N questions of each task")
    parser.add_argument(
        "--python", type=Path, metavar="FILE", help="Python that has lmms-eval (default: an environment in the root)"
    )
    parser.add_argument("--model-args", metavar="K=V,...", help="further settings of lmms-eval's model qwen3_vl")


def add_set(parser: argparse.ArgumentParser, subject: str) -> None:
    """Add `--set`, which changes settings of the subject."""
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="A.B=VALUE",
        action="append",
        default=[],
        help=f"change one setting of {subject}; repeatable",
    )


def positive(text: str) -> int:
    """Return a whole number of 1 or more; another text is an error of the command line."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)
