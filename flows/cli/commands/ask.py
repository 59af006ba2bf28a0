"""`athanor ask MODEL PICTURE "question"`: an exported model answers; the image is preprocessed as in training."""

import argparse
from pathlib import Path

from stages.answer.ask import ask
from stages.shared.inputs.model_directory import resolve_hf_dir


def ask_command(args: argparse.Namespace) -> int:
    """Print the model's answer."""
    picture = None if args.picture == Path("-") else args.picture
    print(ask(resolve_hf_dir(args.model), picture, args.question, adapter_dir=args.adapter))
    return 0
