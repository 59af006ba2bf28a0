"""`athanor up`: Prefect, MLflow and a worker on this machine, until Ctrl-C."""

import argparse

from flows.service.programs import parse_limits
from flows.service.run_service import run_service


def up_command(args: argparse.Namespace) -> int:
    """Run the service until a signal stops it: 0, or 1 if it could not start."""
    return run_service(args.root, args.host, args.max_runs, parse_limits(args.limits))
