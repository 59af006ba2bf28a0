"""`athanor ask MODEL PICTURE "question"`: an exported model answers, with the pixel path it was trained with."""

import argparse
from pathlib import Path

from stages.ask import ask
from stages.hf_directory import check_hf_dir, resolve_hf_dir


def ask_command(args: argparse.Namespace) -> int:
    """Print the answer."""
    hf_dir = resolve_hf_dir(args.model)
    check_hf_dir(hf_dir)
    print(ask(hf_dir, None if args.picture == Path("-") else args.picture, args.question))
    return 0
