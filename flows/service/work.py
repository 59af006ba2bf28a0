"""`python -m flows.service.work NAME ...`: provision (with its options), then Prefect's worker of that name.

Before a worker settles the state of a cancelled or crashed run, it looks for hooks in the run's flow. Provisioning has
loaded all flows by then; otherwise a person who cancels would wait for torch, transformers and MLflow to load.
"""

import sys

from prefect.cli import app

from flows.prefect_server.service_record import POOL
from flows.service.provision import main as provision

if __name__ == "__main__":
    name, *options = sys.argv[1:]
    if status := provision(options):
        sys.exit(status)
    sys.argv = ["prefect", "worker", "start", "--pool", POOL, "--type", "process", "--name", name]
    sys.exit(app())
