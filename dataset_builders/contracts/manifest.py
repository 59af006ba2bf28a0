"""manifest.json: written last into an artifact's directory, so that its presence says that the directory is whole."""

import json
from typing import Any

from pydantic import Field

from dataset_builders.contracts.sample import Split
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_json
from dataset_builders.storage.store import StorePath

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


class ShardEntry(StrictModel):
    """One tar file of a dataset directory."""

    name: str = Field(description="path below the artifact's directory, train/shard-00042.tar")
    split: Split = Field(description="which split the shard belongs to")
    num_samples: int = Field(ge=0)
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    skips: dict[str, int] = Field(default={}, description="samples left out while this shard was written, by reason")


class Parent(StrictModel):
    """An input of the stage: another artifact, or something outside, identified by the digest of its content."""

    name: str = Field(description="the stage that made it, or what it is: hf_dir, raw")
    fingerprint: str


class Manifest(StrictModel):
    """What an artifact is and what it was made from. Holds no time and no host: a rerun gives the same bytes."""

    format_version: int = FORMAT_VERSION
    stage: str
    version: int = Field(description="the stage's VERSION")
    fingerprint: str
    config: dict[str, Any] = Field(description="the stage's identity config, whole")
    parents: dict[str, Parent] = Field(description="role -> input")
    shards: list[ShardEntry] = Field(default=[], description="in order of their names, train before heldout")
    skips: dict[str, int] = Field(default={}, description="samples left out, by reason")
    stats: dict[str, Any] = Field(default={}, description="counts and figures a person or a later stage reads")

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    def write(self, directory: StorePath) -> None:
        write_json(directory / MANIFEST, self.model_dump(mode="json"))


def load_manifest(directory: StorePath) -> Manifest:
    """Read a directory's manifest.

    Raises:
        InputError: there is no manifest, or it has another format version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{directory} has no {MANIFEST}: it is not a finished artifact; run the flow that makes it again"
        )
    return Manifest.model_validate(read_format(path, FORMAT_VERSION))


def read_format(path: StorePath, version: int, stage: str = "") -> dict[str, Any]:
    """The JSON object in an artifact's file.

    Args:
        version: the format version that the caller reads.
        stage: the stage that makes the file, if the file itself does not name it.

    Raises:
        InputError: the file has another format version.
    """
    raw = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("format_version") != version:
        raise InputError(
            f"{path}: format_version is {raw.get('format_version')}, this code reads {version}; "
            f"delete {path.parent} and run the {stage or raw.get('stage')} stage again"
        )
    return raw
