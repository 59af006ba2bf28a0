"""`athanor run`: the flow `vlm-sft` in this process, progress while it runs, and what to do next at its end."""

import argparse
import sys
import time

import psutil

from flows.closing import print_closing
from flows.progress import make_display, use_display
from flows.recipe import DEFAULT_RECIPE, load_recipe
from flows.service.prefect_schema import start_prefect
from flows.service.reconcile import reconcile
from flows.sft import vlm_sft


def run_command(args: argparse.Namespace) -> int:
    """Run a recipe to its end, or raise."""
    recipe = load_recipe(args.recipe, args.overrides)
    is_terminal = sys.stdout.isatty()
    display = make_display(is_terminal)
    use_display(display)
    try:
        start_prefect()
        reconcile(args.root)  # what a killed run has left on this root
        result = vlm_sft(recipe.config, str(args.root), recipe.name, recipe.differs)
    finally:
        display.close()
    seconds = time.time() - psutil.Process().create_time()  # with the imports, which the person waited for too
    again = [*([] if args.recipe == DEFAULT_RECIPE else [args.recipe]), *(f"--set={text}" for text in args.overrides)]
    print_closing(result, args.root, recipe, again, seconds, is_terminal)
    return 0
