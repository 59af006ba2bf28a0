"""Short commands: `athanor preview`, `recipes`, `sync` and `up`. Each imports libraries that take seconds itself."""

import argparse
import re

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from dataset_builders.storage.store import side_dir
from flows.pipeline.recipe import RECIPES, known_recipes
from trainer.contract.names import EXIT_FAILED


def preview_command(args: argparse.Namespace) -> int:
    """Write the page of an artifact again, with other samples, and print its path. Starts no server."""
    from stages.shared.inputs.model_directory import ModelDirectory, resolve_hf_dir
    from stages.shared.preview.render import PreviewOptions, find_target, render_preview

    if args.samples < 1:
        raise InputError(f"--samples {args.samples} is too few; give 1 or more")
    target = find_target(args.path, args.root)
    out = args.out or side_dir(args.root) / "previews" / f"{target.name}.html"
    if args.out is None:
        out.parent.mkdir(parents=True, exist_ok=True)
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: {out.parent} is not a directory; make it or choose another")
    model = ModelDirectory(resolve_hf_dir(args.model)) if args.model else None
    options = PreviewOptions(num_samples=args.samples, key=args.key, model=model, link_from=out.parent)
    write_text(out, render_preview(target, options))
    print(out)
    return 0


def recipes_command(args: argparse.Namespace) -> int:
    """Print the name of each recipe and the first sentence of its comment."""
    names = known_recipes()
    for name in names:
        print(f"{name:{max(map(len, names))}}  {purpose_of(name)}")
    return 0


def purpose_of(name: str) -> str:
    """Return the first sentence of a recipe's comment."""
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    comment = " ".join(line.strip("# ") for line in re.match(r"(#.*\n)*", text)[0].splitlines())
    return re.split(r"(?<=\.) ", comment, maxsplit=1)[0]


def sync_command(args: argparse.Namespace) -> int:
    """Send to MLflow what earlier runs of a root could not send, and print one line per run.

    Returns:
        1 if something could not be sent, else 0.

    Raises:
        InputError: no run was recorded in this root.
    """
    from flows.tracking.record import records_dir
    from flows.tracking.tracker import publish_waiting

    if not records_dir(args.root).is_dir():
        raise InputError(f"--root {args.root} has no record of a run; give the --root of the run that is to be sent")
    published = publish_waiting(args.root)
    for one in published:
        sent = [f"{number} {what}{'s' if number > 1 else ''}" for what, number in one.sent.items()]
        rest = f", the rest waits: {one.problem}" if one.problem else ""
        line = f"{', '.join(sent) or 'nothing'} sent{rest}"
        print(f"{one.name}: {'its own process sends it' if one.is_sending else line}")
    if not published:
        print(f"nothing is left to send in {args.root}")
    return EXIT_FAILED if any(one.problem for one in published) else 0


def up_command(args: argparse.Namespace) -> int:
    """Run Prefect, MLflow and a worker on this machine until a signal. Return 1 if the service could not start."""
    from flows.service.programs import parse_limits
    from flows.service.supervisor import run_service

    return run_service(args.root, args.host, args.max_runs, parse_limits(args.limits))
