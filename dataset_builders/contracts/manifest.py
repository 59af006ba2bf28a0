"""manifest.json and the fingerprint of an artifact.

The manifest is written last into an artifact's directory, so its presence shows that the artifact is complete. The
fingerprint, 16 hex digits, identifies an artifact by its inputs. This module loads no array library, so that a recipe
check can import it; the header of stored image features is here for that reason.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal, TypeVar

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


FeatureType = Literal["bfloat16", "float32"]
ITEM_BYTES: dict[FeatureType, int] = {"bfloat16": 2, "float32": 4}


class FeatureStore(StrictModel):
    """The storage format of an artifact's image features: stats["features"] of its manifest."""

    format_version: Literal[1] = 1
    dtype: FeatureType = Field(description="type of the numbers")
    width: int = Field(gt=0, description="numbers of an image token: its own, then those of each deepstack level")

    @property
    def token_bytes(self) -> int:
        return self.width * ITEM_BYTES[self.dtype]


def read_feature_store(directory: StorePath, stats: Mapping[str, Any]) -> FeatureStore:
    """Return the `FeatureStore` of an artifact, from its manifest's stats."""
    try:
        return FeatureStore.model_validate(stats.get("features"))
    except ValidationError as error:
        raise InputError(
            f"{directory / MANIFEST}: stats.features is not of format_version 1, which this code reads; give "
            "features_dir an artifact of the encode_images stage"
        ) from error


class SubsetOrigin(StrictModel):
    """The rows that a subset was made from: a value of stats["origins"] of the samples' manifest."""

    builder: str = Field(description="name of the builder that read them")
    name: str = Field(description="the subset's own name in its source: docvqa, for mine_docvqa of the source mine")


def read_origins(stats: Mapping[str, Any]) -> dict[str, SubsetOrigin]:
    """Return subset -> its origin, from the stats of the samples' manifest."""
    return {subset: SubsetOrigin.model_validate(origin) for subset, origin in stats["origins"].items()}


def canonical_json(value: object) -> str:
    """Return the value as JSON with sorted keys and no spaces; the text is the same in every process."""

    def encode(item: object) -> object:
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
        if isinstance(item, PurePath):
            return str(item)
        # A callable or a default repr would put an address in memory into the text.
        raise TypeError(f"cannot fingerprint a {type(item).__name__}; use a str, number, list, mapping or dataclass")

    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=encode)


def fingerprint(value: object) -> str:
    """Return 16 hex digits of the SHA-256 of the value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def describe_drift(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """Describe how two nested mappings differ, by dotted field: `optim.lr: 0.001 -> 0.002; seed: 1 -> 2`."""
    before, after = flatten(old), flatten(new)
    return "; ".join(f"{k}: {before.get(k, 'absent')!r} -> {after.get(k, 'absent')!r}" for k in drifted(old, new))


def drifted(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return the dotted fields in which two nested mappings differ."""
    before, after = flatten(old), flatten(new)
    return sorted(k for k in before.keys() | after.keys() if before.get(k, None) != after.get(k, None))


def flatten(value: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return a nested mapping as one level of dotted keys; lists stay values."""
    flat: dict[str, object] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat
