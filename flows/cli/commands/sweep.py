"""`athanor sweep`: run a recipe for every combination of a grid of values, and print a table of all runs."""

import argparse
import sys

from flows.cli.closing import service_command
from flows.cli.text_table import print_table
from flows.deployments.sweep import check_grid, sweep
from flows.pipeline.progress import shown
from flows.prefect_server.temporary import start_prefect
from trainer.contract.names import EXIT_FAILED


def sweep_command(args: argparse.Namespace) -> int:
    """Check every run of the grid, run them all and print the table. Return 1 if a run failed, else 0."""
    variants = check_grid(args.recipe, args.overrides, args.grid)
    print(f"{len(variants)} runs of recipe {variants[0].recipe.name}:")
    for variant in variants:
        print(f"  {variant.name}")
    is_terminal = sys.stdout.isatty()
    with shown(is_terminal):
        start_prefect()
        result = sweep(args.recipe, args.overrides, args.grid, str(args.root))
    print_table("Sweep", result["columns"], result["rows"], is_terminal)
    if result["url"]:
        command = service_command(args.root)
        print(f"\nCompare them in MLflow: {result['url']}")
        if command:
            print(f"  which this command serves: {command}")
    if result["errors"]:
        print("\nFailed:")
        for line in result["errors"]:
            print(f"  {line}")
        print(f"{len(result['errors'])} of {len(variants)} runs failed; the same command runs those again.")
        return EXIT_FAILED
    return 0
