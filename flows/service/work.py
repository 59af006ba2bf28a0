"""`python -m flows.service.work`: provision the server (see its options), then start the worker of this service.

Before a worker settles the state of a cancelled or crashed run, it looks for hooks in the run's flow. Provisioning in
the same process has imported all flows by then. Otherwise a user who cancels a run would have to wait until torch,
transformers and MLflow are imported.
"""

import argparse
import sys

from prefect.cli import app

from flows.prefect_server.service_record import POOL
from flows.service.closed_worker import TYPE
from flows.service.provision import main as provision

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m flows.service.work", description=__doc__)
    parser.add_argument("--name", help="name of the worker (default: a random name)")
    parser.add_argument("--pool", default=POOL, help="name of the work pool (default: %(default)s)")
    parser.add_argument("--with-healthcheck", action="store_true", help="answer health checks on port 8080")
    args, options = parser.parse_known_args()
    if status := provision(["--pool", args.pool, *options]):
        sys.exit(status)
    named = ["--name", args.name] if args.name else []
    healthcheck = ["--with-healthcheck"] if args.with_healthcheck else []
    sys.argv = ["prefect", "worker", "start", "--pool", args.pool, "--type", TYPE, *named, *healthcheck]
    sys.exit(app())
