"""Tensors that an export copies unchanged, because their model family does not compute them."""

from pathlib import Path

from stages.inputs.hf_directory import safetensors_header, weight_files
from trainer.contract.run import TrainConfig
from trainer.model.registry import read_model
from trainer.model.rules import stored_rules


def count_copied(hf_dir: Path, train: TrainConfig | None = None) -> dict[str, int]:
    """Return name prefix -> number of copied tensors of a directory, from the headers of its safetensors
    files. `train` is the training, which may compute some of them; None: it computes none."""
    family, shape = read_model(hf_dir, train)
    names = {name for file in weight_files(hf_dir) for name in safetensors_header(hf_dir / file)}
    names -= {name for rule in stored_rules(family.weight_rules(shape), names) for name in rule.hf}
    counts = {prefix: sum(name.startswith(prefix) for name in names) for prefix in family.copied}
    return {prefix: count for prefix, count in counts.items() if count}
