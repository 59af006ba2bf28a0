"""`athanor sync`: send to MLflow what earlier runs of a root could not send."""

import argparse

from dataset_builders.errors import InputError
from flows.tracking.publish import Published
from flows.tracking.record import records_dir
from flows.tracking.tracker import publish_waiting
from trainer.contract.names import EXIT_FAILED


def sync_command(args: argparse.Namespace) -> int:
    """Send every run that is not completely in MLflow, and print one line per run.

    Returns:
        1 if something could not be sent, else 0.

    Raises:
        InputError: no run was recorded in this root.
    """
    if not records_dir(args.root).is_dir():
        raise InputError(f"--root {args.root} has no record of a run; give the --root of the run that is to be sent")
    published = publish_waiting(args.root)
    for one in published:
        print(_line(one))
    if not published:
        print(f"nothing is left to send in {args.root}")
    return EXIT_FAILED if any(one.problem for one in published) else 0


def _line(one: Published) -> str:
    if one.is_sending:
        return f"{one.name}: its own process sends it"
    sent = ", ".join(f"{number} {what}{'s' if number > 1 else ''}" for what, number in one.sent.items()) or "nothing"
    return f"{one.name}: {sent} sent" + (f", the rest waits: {one.problem}" if one.problem else "")
