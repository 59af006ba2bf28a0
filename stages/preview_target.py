"""Which artifact or shard a person means: a path, a URL, a stage's name or the beginning of a fingerprint."""

import re
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.store import StorePath, check_reachable, location, modified
from stages.artifact import Artifact

_FINGERPRINT = re.compile(r"[0-9a-f]{4,16}")
_ABOVE = 4  # folders above a file of an artifact in which its manifest is looked for


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be shown.

    Attributes:
        artifact: None for a shard that lies outside of any.
        shard: the one shard that is meant; its name in the artifact, or its path where there is none.
    """

    artifact: Artifact | None
    shard: str | StorePath | None = None

    @property
    def name(self) -> str:
        """What a page of it is called, `convert-63347ade`."""
        if self.artifact is None:
            return Path(str(self.shard)).stem
        manifest = self.artifact.manifest
        shard = f"-{Path(str(self.shard)).stem}" if self.shard else ""
        return f"{manifest.stage}-{manifest.fingerprint[:8]}{shard}"


def find_target(text: str, root: StorePath) -> Target:
    """What `text` names.

    Args:
        text: a directory of an artifact or something in it, a shard, a URL of these; or below `root` a stage's name
            (its newest artifact), `stage/fingerprint`, or the beginning of a fingerprint.

    Raises:
        InputError: nothing, or several artifacts.
    """
    path = location(text)
    if "://" in text:
        check_reachable(path)
    if path.exists():
        found = _at(path)
        if found is not None:
            return found
    named = None if "://" in text else _by_name(text.strip("/"), root)
    if named is not None:
        return Target(Artifact.load(named))
    raise InputError(f"{text} is no artifact: it has no {MANIFEST} and names none below {root}; {_way_out(root)}")


def _at(path: StorePath) -> Target | None:
    """The artifact that a path is, or lies in; or a shard by itself."""
    here = path.absolute() if isinstance(path, Path) else path
    for directory in (here, *list(here.parents)[:_ABOVE]):
        if (directory / MANIFEST).is_file():
            is_shard = here.name.endswith(".tar")
            return Target(Artifact.load(directory), f"{here.parent.name}/{here.name}" if is_shard else None)
    return Target(None, path) if path.name.endswith(".tar") and path.is_file() else None


def _by_name(text: str, root: StorePath) -> StorePath | None:
    """The newest artifact of a stage, or the one whose fingerprint begins so."""
    stage, _, prefix = text.rpartition("/")
    if not prefix:
        return None
    made = _artifacts(root)
    if not stage and prefix in made:
        return max(made[prefix], key=lambda directory: (modified(directory / MANIFEST), directory.name))
    if not _FINGERPRINT.fullmatch(prefix):
        return None
    fits = [d for name, dirs in made.items() if stage in ("", name) for d in dirs if d.name.startswith(prefix)]
    if len(fits) > 1:
        names = ", ".join(f"{d.parent.name}/{d.name}" for d in fits[:4])
        raise InputError(f"{text} may be {names}; give more of its fingerprint")
    return fits[0] if fits else None


def _artifacts(root: StorePath) -> dict[str, list[StorePath]]:
    """Stage -> directories of its finished artifacts."""
    folder = root / "artifacts"
    if not folder.is_dir():
        return {}
    stages = sorted((d for d in folder.iterdir() if d.is_dir()), key=str)
    return {d.name: sorted((a for a in d.iterdir() if (a / MANIFEST).is_file()), key=str) for d in stages}


def _way_out(root: StorePath) -> str:
    stages = [name for name, made in _artifacts(root).items() if made]
    if stages:
        return f"give the directory of one, or one of its stages: {', '.join(stages)}"
    return "give the directory of one, a shard, or --root with a stage's name"
