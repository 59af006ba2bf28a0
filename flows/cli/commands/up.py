"""`athanor up`: run Prefect, MLflow and a worker on this machine, until Ctrl-C."""

import argparse

from flows.service.programs import parse_limits
from flows.service.supervisor import run_service


def up_command(args: argparse.Namespace) -> int:
    """Run the service until a signal stops it. Return 0, or 1 if the service could not start."""
    return run_service(args.root, args.host, args.max_runs, parse_limits(args.limits))
