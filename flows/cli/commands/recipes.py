"""`athanor recipes`: list the recipes that are part of athanor."""

import argparse
import re

from flows.pipeline.recipe import RECIPES, known_recipes


def recipes_command(args: argparse.Namespace) -> int:
    """Print the name of each recipe and the first sentence of its comment."""
    names = known_recipes()
    for name in names:
        print(f"{name:{max(map(len, names))}}  {purpose_of(name)}")
    return 0


def purpose_of(name: str) -> str:
    """Return the first sentence of a recipe's comment."""
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    comment = " ".join(line.strip("# ") for line in re.match(r"(#.*\n)*", text)[0].splitlines())
    return re.split(r"(?<=\.) ", comment, maxsplit=1)[0]
