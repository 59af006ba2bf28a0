"""`python -m flows.service.provision`: register deployments, create limits, settle dead runs.

A worker does all of this before it takes flow runs. After a crash of Prefect's server, the service only settles runs.
"""

import argparse
import sys

from dataset_builders.errors import InputError
from dataset_builders.storage.row_objects import named_stores
from dataset_builders.storage.store import side_dir
from flows.deployments.offers import register
from flows.deployments.request import service_root
from flows.prefect_server.private_root import make_private_root
from flows.prefect_server.service_record import POOL
from flows.resources.limits import create_limits, wait_for_server
from flows.service.programs import parse_limits
from flows.service.reconcile import reconcile

SERVER_SECONDS = 240.0


def main(argv: list[str] | None = None) -> int:
    """Provision the server. Return 0, or 2 after one line that says what is wrong.

    The last line of the output is a summary for the user.
    """
    parser = argparse.ArgumentParser(prog="python -m flows.service.provision", description=__doc__)
    parser.add_argument("--pool", default=POOL)
    parser.add_argument("--reconcile-only", action="store_true")
    parser.add_argument("--limit", dest="limits", action="append", default=[], metavar="NAME=SLOTS")
    parser.add_argument("--max-runs", type=int, default=2)
    args = parser.parse_args(argv)
    try:
        root = service_root()
        if line := make_private_root(side_dir(root)):
            print(line, flush=True)
        named_stores()  # reports a wrong store now, and not at the first request
        wait_for_server(SERVER_SECONDS)
        summary = []
        if not args.reconcile_only:
            names = register(root, args.pool, max_runs=args.max_runs)
            create_limits(parse_limits(args.limits))
            summary.append(", ".join(name.rpartition("/")[2] for name in names))
        if num_settled := reconcile(root):
            summary.append(f"{num_settled} flow runs that were cut off are settled")
    except InputError as error:
        print(error)
        return 2
    print("; ".join(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
