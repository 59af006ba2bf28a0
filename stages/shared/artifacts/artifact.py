"""Stage, and Artifact: a committed directory that is identified by its fingerprint.

The fingerprint covers the stage's name and VERSION, its identity config and its parents' fingerprints. A parent that is
made twice may have other bytes under the same fingerprint, for example after a training on a GPU, so the manifest also
has the digest of each parent's manifest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from dataset_builders.contracts.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    Parent,
    ShardEntry,
    fingerprint,
    load_manifest,
)
from dataset_builders.storage.store import StorePath
from trainer.contract.names import PROFILE

_SHOWN = (MANIFEST, "report.json", "report.html")


@dataclass(frozen=True, slots=True)
class Artifact:
    """A committed output directory of a stage."""

    dir: StorePath
    manifest: Manifest

    @classmethod
    def load(cls, directory: StorePath) -> "Artifact":
        return cls(directory, load_manifest(directory))

    def parent(self) -> Parent:
        manifest = self.manifest
        return Parent(name=manifest.stage, fingerprint=manifest.fingerprint, digest=manifest.digest)

    def shown_files(self) -> list[str]:
        """Return the names of the files for people: manifest, report, page, traces of steps."""
        shown = [name for name in _SHOWN if (self.dir / name).is_file()]
        traces = self.dir / PROFILE
        shown += [f"{PROFILE}/{path.name}" for path in traces.iterdir()] if traces.is_dir() else []
        return sorted(shown)


@dataclass(frozen=True, slots=True)
class External:
    """An input that no stage made: a directory of the user, identified by a digest of its content.

    Attributes:
        states: file -> its state when it was digested, see `verify.state_of`; empty for raw data.
        opened: the directory as the plan opened it, for the stages that run in the same process: a `ModelDirectory` or
            an `AdapterDirectory`; None: nothing is open.
    """

    dir: StorePath
    name: str
    digest: str
    states: Mapping[Path, list[int]] = field(default_factory=dict, repr=False, compare=False)
    opened: object = field(default=None, repr=False, compare=False)

    def parent(self) -> Parent:
        return Parent(name=self.name, fingerprint=self.digest, digest=self.digest)


Input = Artifact | External
Check = Callable[[Artifact, Callable[[Path, Callable[[Path], str]], str]], None]  # (artifact, see `DigestCache.digest`)


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The facts for the manifest about a stage's files, which are in the work directory when the stage returns."""

    shards: list[ShardEntry] = field(default_factory=list)
    files: list[FileEntry] = field(default_factory=list)  # entries of `digested` files that the stage knows already
    skips: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: its name, VERSION, and `run(config, inputs, work_dir, resources) -> StageOutput`.

    `run` must be able to continue from any state that an interrupted run of the same fingerprint left in `work_dir`.

    Attributes:
        on_disk: whether `work_dir` must be a local directory, because other programs write there. If False, `run`
            writes only atomically (`atomic_path`, `ShardWriter`), which also works in an object store.
        dataset: the artifact's use as the data of a run in MLflow, for example "samples"; None: it is not the data.
        digested: globs of the files, other than shards, that other stages read or that list samples: the manifest has
            their SHA-256.
        check: a function that checks files that the manifest does not list, before an artifact on a disk is reused. It
            raises DamagedFile; the stage is then run again, starting from the files of the damaged artifact. None: only
            the manifest's files are checked, and a damaged artifact is an error.
        contents: "module:function" that draws the artifact's contents for its page, as HTML, from the artifact and the
            stage's inputs; None: the page shows only report.json and the manifest. It is imported on use, since it
            needs more libraries than a worker should load.
    """

    name: str
    version: int
    run: Callable[..., StageOutput]
    on_disk: bool = False
    dataset: str | None = None
    digested: tuple[str, ...] = ()
    check: Check | None = None
    contents: str | None = None


@dataclass(frozen=True, slots=True)
class StageResult:
    """The artifact of one run of a stage, and the duration of the run."""

    artifact: Artifact
    reused: bool
    seconds: float


def stage_identity(stage: Stage, config: BaseModel, inputs: Mapping[str, Input]) -> dict[str, Any]:
    """Return everything that determines the bytes of the output."""
    return {
        "stage": stage.name,
        "version": stage.version,
        "config": config.model_dump(mode="json"),
        "parents": {role: item.parent().model_dump(exclude={"digest"}) for role, item in inputs.items()},
    }


def changed_inputs(artifact: Artifact, inputs: Mapping[str, Input]) -> list[str]:
    """Return the roles of the inputs whose content is not the one that the artifact was made from."""
    made_from = {role: parent.digest for role, parent in artifact.manifest.parents.items()}
    return [role for role, item in inputs.items() if made_from.get(role, digest := item.parent().digest) != digest]


def artifact_dir(root: StorePath, stage: Stage, identity: Mapping[str, Any]) -> StorePath:
    """Return the directory of the artifact of this identity, whether it exists or not."""
    return root / "artifacts" / stage.name / fingerprint(identity)
