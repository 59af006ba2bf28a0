"""`python -m flows.service.work`: register the deployments and limits with Prefect's server, then start a worker.

Before a worker settles the state of a cancelled or crashed run, it looks for hooks in the run's flow. Registering in
the same process has imported all flows by then. Otherwise a user who cancels a run would have to wait until torch,
transformers and MLflow are imported.
"""

import argparse
import os
import sys

from prefect.cli import app

from dataset_builders.errors import InputError
from dataset_builders.storage.row_objects import named_stores
from dataset_builders.storage.store import side_dir
from flows.pipeline.limits import create_limits, wait_for_server
from flows.service.access import make_private_root
from flows.service.closed_worker import TYPE
from flows.service.deployments import register
from flows.service.programs import parse_limits
from flows.service.request import service_root
from flows.tracking.servers import POOL

SERVER_SECONDS = 240.0


def main(argv: list[str] | None = None) -> int:
    """Run a worker until a signal arrives. Return 2 after one line that says what is wrong."""
    parser = argparse.ArgumentParser(prog="python -m flows.service.work", description=__doc__)
    parser.add_argument("--name", help="name of the worker (default: a random name)")
    parser.add_argument("--pool", default=POOL, help="name of the work pool (default: %(default)s)")
    parser.add_argument("--limit", dest="limits", action="append", default=[], metavar="NAME=SLOTS")
    parser.add_argument("--max-runs", type=int, default=2, help="flow runs at a time (default: %(default)s)")
    parser.add_argument("--with-healthcheck", action="store_true", help="answer health checks on port 8080")
    args = parser.parse_args(argv)
    try:
        if not os.environ.get("PREFECT_API_URL"):
            raise InputError("PREFECT_API_URL is not set: start `athanor up`, or give it a Prefect server's address")
        root = service_root()
        if line := make_private_root(side_dir(root)):
            print(line, flush=True)
        named_stores()  # reports a wrong store now, and not at the first request
        wait_for_server(SERVER_SECONDS)
        names = register(args.pool, max_runs=args.max_runs)
        create_limits(parse_limits(args.limits))
    except InputError as error:
        print(error)
        return 2
    print(", ".join(name.rpartition("/")[2] for name in names), flush=True)
    named = ["--name", args.name] if args.name else []
    healthcheck = ["--with-healthcheck"] if args.with_healthcheck else []
    sys.argv = ["prefect", "worker", "start", "--pool", args.pool, "--type", TYPE, *named, *healthcheck]
    return app()


if __name__ == "__main__":
    sys.exit(main())
