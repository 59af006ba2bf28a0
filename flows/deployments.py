"""Deployments: `python -m flows.deployments` serves the three flows to a Prefect server until it is stopped.

Set PREFECT_API_URL to a running server first (`prefect server start`). The flows then appear in its UI with a form for
every setting of the recipe; no schedule is set here, add one in the UI or with `--cron`.
"""

import argparse
import json
import os
import sys
from typing import Any

from prefect import serve
from prefect.deployments.runner import RunnerDeployment

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import StorePath, absolute, location
from flows.cli import DEFAULT_ROOT
from flows.recipe import DEFAULT_RECIPE, load_recipe
from flows.sft import evaluate, prepare_data, vlm_sft


def make_deployments(root: StorePath, recipe: str = DEFAULT_RECIPE, cron: str | None = None) -> list[RunnerDeployment]:
    """vlm-sft, prepare-data and evaluate with a recipe's settings filled in; `cron` is for vlm-sft alone.

    One run at a time each: two runs of the same artifact would refuse each other.
    """
    config: dict[str, Any] = json.loads(load_recipe(recipe).config.model_dump_json())
    whole = {"config": config, "root": str(root)}
    common = {"tags": ["athanor", recipe], "concurrency_limit": 1}
    return [
        vlm_sft.to_deployment(name=recipe, parameters={**whole, "recipe": recipe}, cron=cron, **common),
        prepare_data.to_deployment(name=recipe, parameters=whole, **common),
        evaluate.to_deployment(name=recipe, parameters=whole, **common),
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.deployments", description=__doc__)
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help="name or path (%(default)s)")
    parser.add_argument("--root", default=DEFAULT_ROOT, help="directory for everything (%(default)s)")
    parser.add_argument("--cron", default=None, help="run vlm-sft on this schedule, for example '0 2 * * *'")
    args = parser.parse_args(argv)
    try:
        if not os.environ.get("PREFECT_API_URL"):
            raise InputError("PREFECT_API_URL is not set: start `prefect server start` and set the address it prints")
        deployments = make_deployments(absolute(location(args.root)), args.recipe, args.cron)
    except InputError as error:
        print(f"athanor: {error}", file=sys.stderr)
        return 2
    serve(*deployments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
