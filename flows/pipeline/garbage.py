"""The search for what nothing in a root needs, and its deletion.

    artifacts/<stage>/<fingerprint>/         finished; kept with all that it was made from while something needs it
    artifacts/train/<fingerprint>/checkpoints/step-000500/   of a released training: see `surplus_checkpoints`
    scratch/<stage>-<fingerprint>/           unfinished; kept while a process works there, and for days after that
    scratch/<stage>-<fingerprint>.<...>      digests and the owner beside these; they go with them
    deleting-<...>/  saving-<...>/           left by killed processes

Only these forms are ever deleted. A link is never followed; it and all that is not understood are named, and stay.
`needs.py` says who needs an artifact. What is deleted is held by the lock of its stage meanwhile.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import filelock

from dataset_builders.contracts.manifest import MANIFEST, Manifest, load_manifest
from dataset_builders.errors import InputError, one_line
from dataset_builders.storage.files import read_object
from dataset_builders.storage.store import DOOMED, StorePath, is_local, rename_doomed
from flows.pipeline.needs import DAY, KEPT_DAYS, LiveRuns, Need, fingerprints_in, is_to_be_sent
from stages.shared.artifacts.artifact import Artifact
from stages.shared.launchers.processes import running_jobs
from trainer.contract.checkpoint import checkpoints_to_delete, read_checkpoint_record
from trainer.contract.names import CHECKPOINTS, RUN_JSON
from trainer.contract.run import CheckpointConfig

_UNREADABLE = (ValueError, LookupError, TypeError)  # errors of a JSON file of another form
_INTERRUPTED = "a killed process left it"
TRAIN, RELEASE = "train", "release"  # stages
SAVING, DAMAGED = "saving-", "damaged-"  # starts of the names of checkpoints
_NAME = re.compile("[0-9a-f]{16}")
_KEY = re.compile(r"[a-z][a-z0-9_]*-[0-9a-f]{16}")
_BESIDE = re.compile(rf"{_KEY.pattern}\.(lock|owner\.json|parents\.json|whole\.json)")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp|mlflow\.db\.tmp.*")
# The entries of a root that athanor, MLflow and Prefect make.
_OURS = re.compile(
    r"artifacts|scratch|tracking|prefect|service|logs|previews|init|mlflow-artifacts|mlflow\.db.*|\.athanor-root|"
    r"example\.png|raw-digests\.json"
)
log = logging.getLogger("athanor.garbage")


class File(NamedTuple):
    """A file, or a link, which is never followed.

    Attributes:
        identity: device and inode, the same for all hard links.
        links: number of its hard links, wherever they are.
        size: bytes.
        changed: time of its last change, in seconds since 1970.
    """

    identity: tuple[int, int]
    links: int
    size: int
    changed: float


@dataclass(slots=True)
class Garbage:
    """A file or directory that nothing needs.

    Attributes:
        why: why nothing needs it, for people.
        key: `<stage>-<fingerprint>` whose lock is held during the deletion; "": none is needed.
        freed: bytes that its deletion frees, after that of the garbage before it: a file with a hard link elsewhere
            frees none.
    """

    path: Path
    why: str
    files: Sequence[File]
    key: str = ""
    freed: int = 0


@dataclass(slots=True)
class Survey:
    """A list of everything in a root.

    Attributes:
        sizes: stage, or other entry of the root -> bytes; hard links count once.
        garbage: what nothing needs, in the order in which it should be deleted.
        kept: who needs something, the number of artifacts, and their bytes with those of unfinished work. Two may need
            the same.
        strangers: path -> why it is not understood and stays.
    """

    sizes: Counter[str] = field(default_factory=Counter)
    garbage: list[Garbage] = field(default_factory=list)
    kept: list[tuple[str, int, int]] = field(default_factory=list)
    strangers: dict[Path, str] = field(default_factory=dict)

    @property
    def freed(self) -> int:
        return sum(each.freed for each in self.garbage)


@dataclass(frozen=True, slots=True)
class _Made:
    """An artifact; without a manifest if that cannot be read.

    Attributes:
        stays: whether it is not understood or behind a link.
    """

    path: Path
    manifest: Manifest | None
    files: Sequence[File]
    stays: bool

    @property
    def parents(self) -> frozenset[str]:
        """The fingerprints that the manifest names."""
        named = {parent.fingerprint for parent in self.manifest.parents.values()}
        return fingerprints_in(json.dumps(self.manifest.config)) | named


def survey(root: Path, needs: Sequence[Need], live: LiveRuns, days: float = KEPT_DAYS) -> Survey:
    """Look at everything in a root, and change nothing.

    Args:
        root: without links in its path.
        days: for how long unfinished work without a process is kept after its last write.
    """
    found = Survey()
    made, works = _artifacts(root, found), _unfinished(root, found)
    needs = [*needs, *_further_needs(root, made, live, found)]
    idle = {} if live.untracked else _idle(works, needs, days)
    works_kept = [path for key, path in works.items() if key not in idle]
    own = {f"{_below(path, root)}, which is unfinished": path for path in works_kept}
    needs += [Need(who, _parents_of(path, made)) for who, path in own.items()]
    needed: set[str] = set()
    to_send: set[str] = set()
    for need in needs:
        reached = _reached(made, need)
        needed |= reached
        to_send |= reached if need.to_send else set()
        files = [file for name in reached for file in made[name].files]
        files += files_below(own[need.who]) if need.who in own else []
        found.kept.append((need.who, len(reached), sum(file.size for file in files)))
    for key, why in idle.items():
        found.garbage.append(Garbage(works[key], why, files_below(works[key]), key))
    _look_at_checkpoints(made, needed - to_send, found)
    unneeded = [each for name, each in made.items() if name not in needed and not each.stays]
    # The newest first: what was made from another artifact goes before it.
    for each in sorted(
        unneeded, key=lambda each: max((file.changed for file in each.files), default=0.0), reverse=True
    ):
        why, key = "no registered version, run or recipe needs it", f"{each.path.parent.name}-{each.path.name}"
        found.garbage.append(Garbage(each.path, why, each.files, key))
    for path in _entries(root):
        if path.is_symlink() or not (_OURS.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)):
            found.strangers[path] = _kind(path)
    _measure(root, {each.path: each.files for each in made.values()}, found)
    return found


def _artifacts(root: Path, found: Survey) -> dict[str, _Made]:
    """Return fingerprint -> artifact. Those that are not understood are among the strangers too."""
    made: dict[str, _Made] = {}
    for folder in sorted((root / "artifacts").glob("*")):
        if folder.is_symlink() or not folder.is_dir():
            found.strangers[folder] = _kind(folder)
        for path in sorted(folder.glob("*")):  # also behind a link, since what is there needs what it was made from
            is_own = path.resolve() == path
            if path.name.startswith(DOOMED) and is_own:
                found.garbage.append(Garbage(path, _INTERRUPTED, files_below(path)))
                continue
            manifest = None
            if is_artifact := bool(_NAME.fullmatch(path.name)) and path.is_dir():
                with contextlib.suppress(InputError):
                    manifest = load_manifest(path)
            if not is_artifact or path.is_symlink():
                found.strangers[path] = _kind(path)
            elif manifest is None:
                found.strangers[path] = f"its {MANIFEST} is missing or damaged; all stays while something needs it"
            elif (manifest.stage, manifest.fingerprint) != (folder.name, path.name):
                found.strangers[path] = f"its {MANIFEST} is that of {manifest.stage}/{manifest.fingerprint}"
            if is_artifact:
                made[path.name] = _Made(path, manifest, files_below(path), path in found.strangers or not is_own)
    return made


def _kind(path: Path) -> str:
    return "a link, which is not followed" if path.is_symlink() else "athanor makes nothing of this name"


def _entries(directory: Path) -> list[Path]:
    """Return what is in a directory, sorted by name; nothing if it does not exist or is a link."""
    return sorted(directory.iterdir()) if directory.is_dir() and not directory.is_symlink() else []


def _below(path: Path, root: Path) -> str:
    return str(path.relative_to(root))


def files_below(path: Path) -> list[File]:
    """Return all files and links below a directory; of a file or link, itself. What disappears meanwhile is left
    out."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            return [_file(path.lstat())]
        return []
    files, folders = [], [os.fspath(path)]
    while folders:
        with contextlib.suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                with contextlib.suppress(FileNotFoundError):
                    files.append(_file(entry.stat(follow_symlinks=False)))
    return files


def _file(about: os.stat_result) -> File:
    return File((about.st_dev, about.st_ino), about.st_nlink, about.st_size, about.st_mtime)


def _further_needs(root: Path, made: Mapping[str, _Made], live: LiveRuns, found: Survey) -> Iterator[Need]:
    """Yield the needs of what is not understood, and of runs whose recipe is not known."""
    for each in made.values():
        if each.stays and each.manifest is not None:
            yield Need(_below(each.path, root), each.parents)
    for run, state in live.untracked.items():
        yield Need(f"flow run {run}, which {state} and may need any artifact", frozenset(made), to_send=True)


def _unfinished(root: Path, found: Survey) -> dict[str, Path]:
    """Return `<stage>-<fingerprint>` -> its work directory."""
    works = {}
    for path in _entries(root / "scratch"):
        is_directory = path.is_dir() and not path.is_symlink()
        if is_directory and path.name.startswith(DOOMED):
            found.garbage.append(Garbage(path, _INTERRUPTED, files_below(path)))
        elif is_directory and _KEY.fullmatch(path.name):
            works[path.name] = path
        elif path.is_symlink() or not (_BESIDE.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)):
            found.strangers[path] = _kind(path)
    return works


def _idle(works: Mapping[str, Path], needs: Iterable[Need], days: float) -> dict[str, str]:
    """Return the work directories that no process, run or recipe needs, each with the reason in words."""
    idle: dict[str, str] = {}
    jobs = running_jobs() if works else set()
    wanted = {name for need in needs for name in need.fingerprints}
    for key, path in works.items():
        has_job = any(Path(job) == path or path in Path(job).parents for job in jobs)
        if has_job or key.rpartition("-")[2] in wanted:
            continue
        with contextlib.suppress(OSError):  # it is published now, or another user's
            # The parents are written anew when work continues in an old artifact that is damaged. See `run_stage`.
            files = [*files_below(path), *files_below(_parents_file(path)), _file(path.lstat())]
            age = time.time() - max(file.changed for file in files)
            if age < days * DAY:
                continue
            with _held(path.parent, key) as is_held:
                if is_held:
                    idle[key] = f"unfinished, and nothing was written for {age / DAY:.1f} days"
    return idle


@contextlib.contextmanager
def _held(scratch: Path, key: str) -> Iterator[bool]:
    """Hold the lock with which `run_stage` makes an artifact; yield False if another process holds it."""
    lock = filelock.FileLock(scratch / f"{key}.lock")
    with contextlib.suppress(filelock.Timeout):
        lock.acquire(timeout=0)
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _parents_file(work: Path) -> Path:
    return work.with_name(f"{work.name}.parents.json")


def _parents_of(work: Path, made: Mapping[str, _Made]) -> frozenset[str]:
    """Return the fingerprints of the artifacts from which unfinished work is made. See `run_stage`."""
    digests: set[object] = set()
    with contextlib.suppress(InputError):
        digests |= {*read_object(_parents_file(work), "").values()}
    return frozenset(
        name for name, each in made.items() if each.manifest is not None and each.manifest.digest in digests
    )


def _reached(made: Mapping[str, _Made], need: Need) -> set[str]:
    """Return the fingerprints of the artifacts that something needs, with all from which they were made."""
    reached: set[str] = set()
    left = need.fingerprints & made.keys()
    while left:
        name = min(left)
        reached.add(name)
        parents = made.keys() if made[name].manifest is None else made[name].parents & made.keys()
        left = (left | parents) - reached
    return reached


def _look_at_checkpoints(made: Mapping[str, _Made], needed: Collection[str], found: Survey) -> None:
    """Add what is left over in the checkpoints of needed trainings."""
    released = {
        parent.fingerprint
        for each in made.values()
        if each.manifest is not None and each.manifest.stage == RELEASE
        for parent in each.manifest.parents.values()
    }
    for name in sorted(needed):
        training = made[name]
        if training.manifest is None or training.manifest.stage != TRAIN or training.stays:
            continue
        key = f"{TRAIN}-{name}"
        for path in _entries(training.path / CHECKPOINTS):
            if path.name.startswith(DAMAGED):
                found.strangers[path] = "a damaged checkpoint, which is kept for a person"
            elif path.name.startswith((SAVING, DOOMED)) and not path.is_symlink():
                found.garbage.append(Garbage(path, _INTERRUPTED, files_below(path), key))
        if name not in released:
            continue
        try:
            surplus = surplus_checkpoints(training.path, training.manifest)
        except _UNREADABLE as error:
            found.strangers[training.path / CHECKPOINTS] = f"not pruned: {one_line(error)}"
            continue
        for path in surplus:
            why = "its training is released, see execution.checkpoint.keep_released"
            found.garbage.append(Garbage(path, why, files_below(path), key))


def surplus_checkpoints(training: Path, manifest: Manifest) -> list[Path]:
    """Return the checkpoints that a finished training no longer needs once its model is released, by the settings with
    which it ran. The one that was exported is never among them.

    Raises:
        ValueError, LookupError, TypeError: run.json, or the record of the exported checkpoint, cannot be read.
    """
    settings = read_object(training / RUN_JSON, "its checkpoints stay")
    config = CheckpointConfig.model_validate(settings["execution"]["checkpoint"])
    exported = training / manifest.stats["checkpoint"]
    read_checkpoint_record(exported)
    older = checkpoints_to_delete(training / CHECKPOINTS, config.keep_released, config.keep_every)
    return [path for path in older if path != exported and not path.is_symlink()]


def prune_released(root: StorePath, training: Artifact) -> None:
    """Delete the checkpoints that a training in a local root no longer needs, now that its model is released, unless a
    run that shares it is still to send them to MLflow. An error is only logged: `athanor gc` finds them later."""
    try:
        if not is_local(training.dir) or is_to_be_sent(root, training.manifest.fingerprint):
            return
        for path in surplus_checkpoints(training.dir, training.manifest):
            shutil.rmtree(rename_doomed(path))
    except (OSError, *_UNREADABLE) as error:
        log.warning("the older checkpoints of %s are not deleted (%s)", training.dir, one_line(error))


def _measure(root: Path, known: Mapping[Path, Sequence[File]], found: Survey) -> None:
    """Fill in the bytes: of each stage and other entry, and what each deletion frees.

    Args:
        known: path -> its files, where they were listed already.
    """
    seen: set[tuple[int, int]] = set()
    stages = {path for folder in _entries(root / "artifacts") for path in _entries(folder) or [folder]}
    others = {path for path in _entries(root) if path.name != "artifacts" or path.is_symlink()}
    for path in sorted(stages | others):
        name = path.name if path in others else path.relative_to(root / "artifacts").parts[0]
        for file in known[path] if path in known else files_below(path):
            found.sizes[name] += 0 if file.identity in seen else file.size
            if file.links > 1:
                seen.add(file.identity)
    links: Counter[tuple[int, int]] = Counter()
    for each in found.garbage:
        for file in each.files:
            links[file.identity] += 1
            each.freed += file.size if links[file.identity] == file.links else 0


def delete(root: Path, garbage: Iterable[Garbage], may_go_on: Callable[[], bool]) -> Iterator[tuple[Garbage, str]]:
    """Delete one thing after the other, and yield each with the reason in words if it stays, else with "".

    Args:
        may_go_on: asked before each deletion; False ends the work.
    """
    for each in garbage:
        if not may_go_on():
            return
        problem = ""
        try:
            with _held(root / "scratch", each.key) if each.key else contextlib.nullcontext(True) as is_held:
                if is_held:
                    _remove(root, each)
                else:
                    problem = "a process works there"
        except OSError as error:
            problem = one_line(error)
        yield each, problem


def _remove(root: Path, each: Garbage) -> None:
    if each.path.is_dir():
        shutil.rmtree(each.path if each.path.name.startswith(DOOMED) else rename_doomed(each.path))
    else:
        each.path.unlink()
    if each.key and each.path.name in (each.key, each.key.rpartition("-")[2]):
        for path in (root / "scratch").glob(f"{each.key}.*.json"):
            path.unlink()
