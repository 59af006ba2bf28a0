"""`athanor compare`: a run for every combination of a grid of values, and a table of all of them at its end."""

import argparse
import sys

from flows.closing import program
from flows.compare import check_grid, compare
from flows.progress import make_display, use_display
from flows.service.prefect_schema import start_prefect
from flows.text_table import print_table
from stages.tracking import server_command
from trainer.contract import EXIT_FAILED


def compare_command(args: argparse.Namespace) -> int:
    """Check every run of the grid, run them, print the table; 1 where a run has failed."""
    variants = check_grid(args.recipe, args.overrides, args.grid)
    print(f"{len(variants)} runs of recipe {variants[0].recipe.name}:")
    for variant in variants:
        print(f"  {variant.name}")
    is_terminal = sys.stdout.isatty()
    display = make_display(is_terminal)
    use_display(display)
    try:
        start_prefect()
        result = compare(args.recipe, args.overrides, args.grid, str(args.root))
    finally:
        display.close()
    print_table("Comparison", result["columns"], result["rows"], is_terminal)
    if result["url"]:
        print(f"\nCompare them in MLflow: {result['url']}")
        if command := server_command(args.root, program("mlflow")):
            print(f"  {command}")
    if result["errors"]:
        print("\nFailed:")
        for line in result["errors"]:
            print(f"  {line}")
        print(f"{len(result['errors'])} of {len(variants)} runs failed; the same command goes on with those.")
        return EXIT_FAILED
    return 0
