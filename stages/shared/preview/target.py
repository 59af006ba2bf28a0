"""The lookup of an artifact or shard by a path, a URL, a stage's name or the beginning of a fingerprint."""

import re
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, check_reachable, location, modified
from stages.shared.artifacts.artifact import Artifact

_FINGERPRINT = re.compile(r"[0-9a-f]{4,16}")
_MAX_FOLDERS_UP = 4  # most folders between a file of an artifact and its manifest


@dataclass(frozen=True, slots=True)
class Target:
    """The artifact or shard to show.

    Attributes:
        artifact: the artifact; None for a shard outside of any artifact.
        shard: the only shard to show: its name in the artifact, or its path if there is no artifact.
    """

    artifact: Artifact | None
    shard: str | StorePath | None = None

    @property
    def name(self) -> str:
        """The name of the target's page, `convert-63347ade`."""
        if self.artifact is None:
            return Path(str(self.shard)).stem
        manifest = self.artifact.manifest
        shard = f"-{Path(str(self.shard)).stem}" if self.shard else ""
        return f"{manifest.stage}-{manifest.fingerprint[:8]}{shard}"


def find_target(text: str, root: StorePath) -> Target:
    """Return the artifact or shard that `text` names.

    Args:
        text: a directory of an artifact or a path inside it, a shard, or a URL of these. Or, below `root`, a stage's
            name (for its newest artifact), `stage/fingerprint`, or the beginning of a fingerprint.

    Raises:
        InputError: the text names nothing, or several artifacts.
    """
    path = location(text)
    if "://" in text:
        check_reachable(path)
    if path.exists():
        target = _at(path)
        if target is not None:
            return target
    named = None if "://" in text else _by_name(text.strip("/"), root)
    if named is not None:
        return Target(Artifact.load(named))
    raise InputError(f"{text} is not an artifact: it has no {MANIFEST} and names none below {root}; {_way_out(root)}")


def _at(path: StorePath) -> Target | None:
    """Return the artifact at a path or around it, or a shard without an artifact."""
    full = path.absolute() if isinstance(path, Path) else path
    for directory in (full, *list(full.parents)[:_MAX_FOLDERS_UP]):
        if (directory / MANIFEST).is_file():
            is_shard = full.name.endswith(".tar")
            return Target(Artifact.load(directory), f"{full.parent.name}/{full.name}" if is_shard else None)
    return Target(None, path) if path.name.endswith(".tar") and path.is_file() else None


def _by_name(text: str, root: StorePath) -> StorePath | None:
    """Return the newest artifact of a stage, or the artifact whose fingerprint begins with the text."""
    stage, _, prefix = text.rpartition("/")
    if not prefix:
        return None
    artifacts = _artifacts(root)
    if not stage and prefix in artifacts:
        return max(artifacts[prefix], key=lambda directory: (modified(directory / MANIFEST), directory.name))
    if not _FINGERPRINT.fullmatch(prefix):
        return None
    fits = [d for name, dirs in artifacts.items() if stage in ("", name) for d in dirs if d.name.startswith(prefix)]
    if len(fits) > 1:
        names = ", ".join(f"{d.parent.name}/{d.name}" for d in fits[:4])
        raise InputError(f"{text} may be {names}; give more of its fingerprint")
    return fits[0] if fits else None


def _artifacts(root: StorePath) -> dict[str, list[StorePath]]:
    """Return stage -> directories of its finished artifacts."""
    folder = root / "artifacts"
    if not folder.is_dir():
        return {}
    stages = sorted((d for d in folder.iterdir() if d.is_dir()), key=str)
    return {d.name: sorted((a for a in d.iterdir() if (a / MANIFEST).is_file()), key=str) for d in stages}


def _way_out(root: StorePath) -> str:
    stages = [name for name, directories in _artifacts(root).items() if directories]
    if stages:
        return f"give the directory of one, or one of its stages: {', '.join(stages)}"
    return "give the directory of one, a shard, or --root with a stage's name"
