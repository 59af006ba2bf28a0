"""Comparison of complete directories by the SHA-256 of every file."""

from pathlib import Path

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.storage.files import sha256_file


def tree_digest(directory: Path) -> dict[str, str]:
    """Return path below the directory -> SHA-256 for every file in it."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): sha256_file(path) for path in files}


def damaged_shards(directory: Path, manifest: Manifest) -> list[str]:
    """Return the names of the shards whose SHA-256 differs from the manifest's."""
    return [shard.name for shard in manifest.shards if sha256_file(directory / shard.name) != shard.sha256]
