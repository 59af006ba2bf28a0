"""`athanor gc`: list what nothing in a root needs any more, and delete it with --delete."""

import argparse
import os
import sys
from pathlib import Path

from dataset_builders.errors import InputError, one_line
from dataset_builders.readers.source_files import ROOT_MARK
from dataset_builders.storage.files import check_database
from dataset_builders.storage.store import is_local
from flows.cli.status import runs_of
from flows.cli.terminal import bytes_text, print_table
from flows.pipeline.garbage import Garbage, delete, survey
from flows.pipeline.needs import KEPT_DAYS, LiveRuns, live_runs, needs_of
from flows.tracking.servers import check_prefect_database, mlflow_database, prefect_home
from trainer.contract.names import EXIT_FAILED


def gc_command(args: argparse.Namespace) -> int:
    """List what can be deleted, what keeps the rest, and what is not understood; with --delete, delete it.

    Returns:
        1 if something could not be deleted, else 0.

    Raises:
        InputError: the root is in an object store or not there, or it is not known what is needed.
    """
    if not is_local(args.root):
        raise InputError(
            f"--root {args.root}: whether another machine uses an artifact of a store is not known here; delete "
            "prefixes that you no longer need with the store's own tools"
        )
    if not (args.root / ROOT_MARK).is_file():
        raise InputError(f"--root {args.root} is not a directory of earlier runs (no {ROOT_MARK}); give theirs")
    check_database(mlflow_database(args.root), "earlier runs")
    check_prefect_database(prefect_home(args.root))
    live = live_runs(args.root, _waiting_runs(args.root))
    days = KEPT_DAYS if args.days is None else args.days
    needs = needs_of(args.root, live, os.environ.get("MLFLOW_TRACKING_URI"), args.keep, days)
    found, is_terminal = survey(args.root, needs, live, days), sys.stdout.isatty()
    print(f"root {args.root}: {bytes_text(found.sizes.total())}")
    if found.kept:
        rows = [(who, f"{number}", bytes_text(size)) for who, number, size in found.kept]
        print_table("Needed", ("by", "artifacts", "in all"), rows, is_terminal)
    if found.strangers:
        rows = [(_below(path, args.root), why) for path, why in found.strangers.items()]
        print_table("Not understood, and left", ("what", "why"), rows, is_terminal)
    if not found.garbage:
        print("\nnothing can be deleted")
        return 0
    if args.delete:
        print()
        return _delete(args.root, found.garbage, live)
    rows = [(_below(each.path, args.root), each.why, bytes_text(each.freed)) for each in found.garbage]
    print_table("Can be deleted", ("what", "why", "frees"), rows, is_terminal)
    print(f"\n{bytes_text(found.freed)} would be free; the same command with --delete deletes these")
    return 0


def _waiting_runs(root: Path) -> set[str]:
    """Return the ids of the flow runs that wait in Prefect.

    Raises:
        InputError: Prefect's server or database cannot be read.
    """
    try:
        with runs_of(root, None) as runs:
            return runs.waiting() if runs else set()
    except Exception as error:  # every transport library has its own kinds
        where = os.environ.get("PREFECT_API_URL") or prefect_home(root) / "prefect.db"
        why = f"Prefect at {where} cannot be read ({one_line(error)}), so it is unknown which runs wait"
        raise InputError(f"{why}; start it, or correct PREFECT_API_URL") from error


def _delete(root: Path, garbage: list[Garbage], live: LiveRuns) -> int:
    """Delete, print a line for each, and return the exit status."""

    def no_run_has_begun() -> bool:
        now = live_runs(root)
        return now.begun <= live.begun and now.untracked.keys() <= live.untracked.keys()

    freed, done, status = 0, 0, 0
    for each, problem in delete(root, garbage, no_run_has_begun):
        done += 1
        name = _below(each.path, root)
        if problem:
            print(f"left {name}: {problem}", flush=True)
            status = EXIT_FAILED
            continue
        freed += each.freed
        print(f"deleted {name}: {bytes_text(each.freed)}, {each.why}", flush=True)
    if done < len(garbage):
        print(f"a run has begun, so {len(garbage) - done} of {len(garbage)} stay; run the same command again")
        status = EXIT_FAILED
    print(f"freed {bytes_text(freed)}")
    return status


def _below(path: Path, root: Path) -> str:
    return str(path.relative_to(root))
