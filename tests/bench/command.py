"""The parts that benches share: the parser of a command, a folder for what it writes, and tables in Markdown.

Imports nothing heavy, because some benches measure the memory of a process that has imported them.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# Defaults with which the benches of trainings show on a CPU that they work.
TINY_TRAINING = {
    "model": "qwen3_vl_tiny",
    "seq_len": 256,
    "global_batch": 4,
    "bins": 12,
    "steps": 3,
    "precision": "float32",
}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows the bench's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_training(parser: argparse._ActionsContainer, precisions: Iterable[str]) -> None:
    """Add the settings of trainings that are measured."""
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--precision", choices=precisions, default="bfloat16")
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--global-batch", type=int, default=8, help="bins a step, over all GPUs")
    parser.add_argument("--bins", type=int, default=48, help="bins on disk, at least")
    parser.add_argument("--steps", type=int, default=10, help="steps that count")


@contextlib.contextmanager
def bench_folder(parent: Path | str | None = None) -> Iterator[Path]:
    """Make a folder, by default in the system's place for temporary files, and delete it at the end."""
    with tempfile.TemporaryDirectory(prefix="athanor-bench-", dir=parent) as folder:
        yield Path(folder)


def table_head(texts: Sequence[str], numbers: Sequence[str] = ()) -> str:
    """Return the head of a table: columns of texts, then columns of numbers."""
    return f"{table_row([*texts, *numbers])}\n{table_row(['---'] * len(texts) + ['---:'] * len(numbers))}"


def table_row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def print_report(text: str, out: Path | None) -> None:
    """Print a report, and write it into a file if one is given."""
    print(text, flush=True)
    if out:
        out.write_text(f"{text}\n")
