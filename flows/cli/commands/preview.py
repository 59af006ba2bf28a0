"""`athanor preview PATH`: one self-contained HTML file that shows an artifact. Serves nothing."""

import argparse
from pathlib import Path

from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from stages.inputs.hf_directory import resolve_hf_dir
from stages.preview.render import PreviewOptions, render_preview
from stages.preview.target import find_target


def preview_command(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    if args.samples < 1:
        raise InputError(f"--samples {args.samples} is too few; give 1 or more")
    target = find_target(args.path, args.root)
    out = args.out or Path(f"preview-{target.name}.html")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: {out.parent} is not a directory; make it or choose another")
    hf_dir = resolve_hf_dir(args.model) if args.model else None
    options = PreviewOptions(num_samples=args.samples, key=args.key, hf_dir=hf_dir, link_from=out.parent)
    write_text(out, render_preview(target, options))
    print(out)
    return 0
