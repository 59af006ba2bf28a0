"""`python -m flows.service.provision`: register deployments, create limits, put right what dead processes have left.

A process of its own beside Prefect's server: the one that watches stays small, and a wrong answer ends this one alone.
"""

import argparse
import os
import shlex
import sys
import time
import urllib.request

from dataset_builders.contracts.errors import InputError
from flows.deployments import register
from flows.limits import create_limits
from flows.request import service_root
from flows.service.options import parse_limits
from flows.service.reconcile import reconcile
from flows.service.record import POOL

SERVER_SECONDS = 240.0
# Given, the worker starts it as it is; otherwise it first looks for a workspace, in two more processes.
ENGINE = shlex.join([sys.executable, "-m", "flows.service.engine"])


def main(argv: list[str] | None = None) -> int:
    """0, or 2 with one line that says what is wrong; the last line that is printed is the one worth showing."""
    parser = argparse.ArgumentParser(prog="python -m flows.service.provision", description=__doc__)
    parser.add_argument("--reconcile-only", action="store_true")
    parser.add_argument("--limit", dest="limits", action="append", default=[], metavar="NAME=SLOTS")
    parser.add_argument("--max-runs", type=int, default=2)
    args = parser.parse_args(argv)
    try:
        root = service_root()
        wait_for_server(f"{os.environ['PREFECT_API_URL']}/health", SERVER_SECONDS)
        names = [] if args.reconcile_only else register(root, POOL, max_runs=args.max_runs, command=ENGINE)
        if not args.reconcile_only:
            create_limits(parse_limits(args.limits))
        settled = reconcile(root)
    except InputError as error:
        print(error)
        return 2
    told = [", ".join(name.rpartition("/")[2] for name in names)] if names else []
    told += [f"{settled} flow runs that were cut off are settled"] if settled else []
    print("; ".join(told))
    return 0


def wait_for_server(url: str, seconds: float) -> None:
    """Return when it answers.

    Raises:
        InputError: it did not within so many seconds.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while True:
        try:
            with opener.open(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise InputError(f"Prefect's server at {url} did not answer within {seconds:.0f} s") from None
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
