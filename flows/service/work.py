"""`python -m flows.service.work`: provision (with its options), then a worker that runs what this service offers.

Before a worker settles the state of a cancelled or crashed run, it looks for hooks in the run's flow. Provisioning has
loaded all flows by then; otherwise a person who cancels would wait for torch, transformers and MLflow to load.
"""

import argparse
import sys

from prefect.cli import app

from flows.prefect_server.service_record import POOL
from flows.service.closed_worker import TYPE
from flows.service.provision import main as provision

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m flows.service.work", description=__doc__)
    parser.add_argument("--name", help="of the worker; made up unless given")
    parser.add_argument("--pool", default=POOL, help="work pool (%(default)s)")
    parser.add_argument("--with-healthcheck", action="store_true", help="answer on port 8080 whether the worker lives")
    args, options = parser.parse_known_args()
    if status := provision(["--pool", args.pool, *options]):
        sys.exit(status)
    named = ["--name", args.name] if args.name else []
    healthcheck = ["--with-healthcheck"] if args.with_healthcheck else []
    sys.argv = ["prefect", "worker", "start", "--pool", args.pool, "--type", TYPE, *named, *healthcheck]
    sys.exit(app())
