"""`athanor sync`: send to MLflow what earlier runs of a root could not."""

import argparse

from stages.tracking import Replayed, replay_waiting
from trainer.contract import EXIT_FAILED


def sync_command(args: argparse.Namespace) -> int:
    """Deliver every journal of the root and say a line a run; 1 where something waits still."""
    replayed = replay_waiting(args.root)
    for one in replayed:
        print(_line(one))
    if not replayed:
        print(f"nothing waits in {args.root}")
    return EXIT_FAILED if any(one.problem for one in replayed) else 0


def _line(one: Replayed) -> str:
    if one.is_sending:
        return f"{one.name}: its own process sends, {one.waiting} entries wait"
    if one.problem:
        return f"{one.name}: {one.sent} entries sent, {one.waiting} wait: {one.problem}"
    return f"{one.name}: {one.sent} entries sent"
