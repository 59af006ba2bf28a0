"""`athanor run`: the flow `vlm-sft` in this process, progress while it runs, and what to do next at its end."""

import argparse
import sys
import time

import psutil

from flows.cli.closing import print_closing
from flows.pipeline.flow import vlm_sft
from flows.pipeline.graph import modules_line, trains_here
from flows.pipeline.progress import shown
from flows.pipeline.recipe import DEFAULT_RECIPE, load_recipe
from flows.prefect_server.temporary import start_prefect
from flows.service.reconcile import reconcile


def run_command(args: argparse.Namespace) -> int:
    """Run a recipe to its end, or raise."""
    recipe = load_recipe(args.recipe, args.overrides)
    is_terminal = sys.stdout.isatty()
    if trains_here(recipe.config):
        print(modules_line(recipe.config), flush=True)
    with shown(is_terminal):
        start_prefect()
        reconcile(args.root)  # settles what a killed run left on this root
        result = vlm_sft(recipe.config, str(args.root), recipe.name, recipe.differs)
    seconds = time.time() - psutil.Process().create_time()  # with the imports: the person waited for them too
    recipe_words = [] if args.recipe == DEFAULT_RECIPE else [args.recipe]
    arguments = [*recipe_words, *(f"--set={text}" for text in args.overrides)]
    print_closing(result, args.root, recipe, arguments, seconds, is_terminal)
    return 0
