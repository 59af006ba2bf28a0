"""An adapter in PEFT's directory, from which a training goes on."""

from pathlib import Path

from dataset_builders.contracts.fingerprint import fingerprint
from dataset_builders.storage.files import sha256_file
from stages.artifacts.artifact import External
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS


def adapter_input(path: Path) -> External:
    """The adapter: its settings and weights by their full SHA-256."""
    digests = {name: sha256_file(path / name) for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
    return External(dir=path, name="adapter", digest=fingerprint(digests))
