"""Tensors that an export copies unchanged, because their model family does not compute them."""

from pathlib import Path

from stages.inputs.hf_directory import safetensors_header, weight_files
from trainer.model.registry import read_model


def count_carried(hf_dir: Path) -> dict[str, int]:
    """Return name prefix -> number of carried (copied) tensors of a directory; empty if there are none.

    The numbers come from the headers of the safetensors files.
    """
    family, _ = read_model(hf_dir)
    names = [name for file in weight_files(hf_dir) for name in safetensors_header(hf_dir / file)]
    counts = {prefix: sum(name.startswith(prefix) for name in names) for prefix in family.carried}
    return {prefix: count for prefix, count in counts.items() if count}
