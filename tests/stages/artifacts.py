"""An artifact of a stage that did not run."""

from pathlib import Path

from dataset_builders.contracts.manifest import Manifest
from stages.shared.artifacts.artifact import Artifact


def stage_artifact(directory: Path, stage: str, **manifest: object) -> Artifact:
    """Write a manifest with these fields beside what lies in the directory, and load the artifact."""
    directory.mkdir(parents=True, exist_ok=True)
    given = {"version": 1, "fingerprint": f"{stage:0<16.16}", "config": {}, "parents": {}} | manifest
    Manifest(stage=stage, **given).write(directory)
    return Artifact.load(directory)
