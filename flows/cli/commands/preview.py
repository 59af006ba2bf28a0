"""`athanor preview PATH`: write the page of an artifact again, with other samples. Starts no server."""

import argparse

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from dataset_builders.storage.store import side_dir
from stages.shared.inputs.model_directory import ModelDirectory, resolve_hf_dir
from stages.shared.preview.render import PreviewOptions, find_target, render_preview


def preview_command(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
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
