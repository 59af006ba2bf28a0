"""`athanor run`: run the flow `vlm-sft` in this process, show its progress, and print the next commands at its end."""

import argparse
import sys
import time

import psutil

from flows.cli.closing import print_closing
from flows.pipeline.flow import vlm_sft
from flows.pipeline.plan import first_lines
from flows.pipeline.progress import shown
from flows.pipeline.recipe import DEFAULT_RECIPE
from flows.prefect_server.temporary import start_prefect
from flows.service.reconcile import reconcile


def run_command(args: argparse.Namespace) -> int:
    """Run a recipe to its end."""
    is_terminal = sys.stdout.isatty()
    for line in first_lines(args.plan):
        print(line, flush=True)
    with shown(is_terminal):
        start_prefect()
        reconcile(args.root)  # ends the flow runs of this root whose process was killed
        result = vlm_sft(args.plan)
    seconds = time.time() - psutil.Process().create_time()  # with the imports, since the user waited for them too
    recipe_words = [] if args.recipe == DEFAULT_RECIPE else [args.recipe]
    arguments = [*recipe_words, *(f"--set={text}" for text in args.overrides)]
    print_closing(result, args.plan, arguments, seconds, is_terminal)
    return 0
