"""`athanor up`: Prefect, MLflow and a worker on this machine, until Ctrl-C."""

import argparse

from flows.service.access import check_access
from flows.service.database import find_database
from flows.service.options import Options, parse_limits
from flows.service.run_service import run_service


def up_command(args: argparse.Namespace) -> int:
    """Run the service until it is told to stop; 0 then, 1 when it could not start."""
    options = Options(
        root=args.root,
        access=check_access(args.host),
        database=find_database(args.database),
        max_runs=args.max_runs,
        limits=parse_limits(args.limits),
    )
    return run_service(options)
