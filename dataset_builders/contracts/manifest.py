"""manifest.json: written last into an artifact's directory, so its presence shows that the artifact is complete."""

import hashlib
import json
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from dataset_builders.contracts.sample import Split
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import MANIFEST, InputError, damaged
from dataset_builders.storage.files import read_object, sha256_file, write_json
from dataset_builders.storage.store import StorePath, local_copy

FORMAT_VERSION = 1
_DIGEST = "digest"  # field of manifest.json: SHA-256 of its other fields


class ShardEntry(StrictModel):
    """One tar file of a dataset directory."""

    name: str = Field(description="path below the artifact's directory, train/shard-00042.tar")
    split: Split = Field(description="which split the shard belongs to")
    num_samples: int = Field(ge=0)
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    skips: dict[str, int] = Field(default={}, description="samples left out while this shard was written, by reason")


class FileEntry(StrictModel):
    """A file of an artifact that is not a shard and that a later stage reads."""

    name: str = Field(description="path below the artifact's directory, index/00000.parquet")
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


def file_entry(directory: StorePath, name: str) -> FileEntry:
    """Return the entry of a file below a directory; reads the whole file to hash it."""
    path = directory / name
    return FileEntry(name=name, size_bytes=path.stat().st_size, sha256=sha256_file(local_copy(path)))


class Parent(StrictModel):
    """An input of the stage: another artifact, or something outside, identified by the digest of its content."""

    name: str = Field(description="the stage that made it, or its kind: hf_dir, raw")
    fingerprint: str
    digest: str = Field(description="digest of the input's manifest, or of its content")


class Manifest(StrictModel):
    """The description of an artifact and its inputs. Holds no time and no host name: a rerun gives the same bytes."""

    format_version: int = FORMAT_VERSION
    stage: str
    version: int = Field(description="the stage's VERSION")
    fingerprint: str
    config: dict[str, Any] = Field(description="the stage's identity config, whole")
    parents: dict[str, Parent] = Field(description="role -> input")
    shards: list[ShardEntry] = Field(default=[], description="in order of their names, train before heldout")
    files: list[FileEntry] = Field(default=[], description="by name")
    skips: dict[str, int] = Field(default={}, description="samples left out, by reason")
    stats: dict[str, Any] = Field(default={}, description="counts and figures a person or a later stage reads")

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def digest(self) -> str:
        """SHA-256 of all fields, in 64 hex digits."""
        return _digest(json.loads(json.dumps(self.model_dump(mode="json"))))

    def write(self, directory: StorePath) -> None:
        write_json(directory / MANIFEST, {**self.model_dump(mode="json"), _DIGEST: self.digest})


def load_manifest(directory: StorePath) -> Manifest:
    """Read a directory's manifest; InputError if there is none, it has another format version, or it is damaged."""
    path = directory / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{directory} has no {MANIFEST}: it is not a finished artifact; run the flow that makes it again"
        )
    return read_format(path, Manifest, FORMAT_VERSION, has_digest=True)


Schema = TypeVar("Schema", bound=StrictModel)


def read_format(
    path: StorePath, schema: type[Schema], version: int, stage: str = "", *, has_digest: bool = False
) -> Schema:
    """Return the content of an artifact's JSON file; InputError if it has another format version, or is damaged.

    Args:
        stage: the stage that makes the file, if the file itself does not name it.
        has_digest: whether one field is the digest of the other fields.
    """
    raw = read_object(path, f"delete {path.parent} and run the same command again, which makes it anew")
    if raw.get("format_version") != version:
        raise InputError(
            f"{path}: format_version is {str(raw.get('format_version'))[:40]}, this code reads {version}; "
            f"delete {path.parent} and run the {stage or raw.get('stage')} stage again"
        )
    if has_digest and (digest := raw.pop(_DIGEST, None)) != _digest(raw):
        raise damaged(path, "is damaged: it " + ("has no digest" if digest is None else "is not as it was written"))
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise damaged(path, f"is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}"[:300]) from error


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
