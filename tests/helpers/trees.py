"""Whole directories compared by the SHA-256 of every file."""

from pathlib import Path

from dataset_builders.contracts.files import sha256_file


def tree_digest(directory: Path) -> dict[str, str]:
    """Path below the directory -> SHA-256, for every file in it."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): sha256_file(path) for path in files}
