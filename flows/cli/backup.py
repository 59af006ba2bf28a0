"""`athanor backup`: copy what a root could not make again, while runs and `athanor up` go on.

    tracking/                the records of runs
    mlflow.db, prefect/      the databases, by SQLite's own backup
    mlflow-artifacts/        MLflow's files
    artifacts/               releases, exports and evaluations that a registered version or its run names

In this order. A record that is older than the database is only sent to MLflow once more, and every file that a database
names was there before the file is copied. The copy is a root: its stages make the other artifacts again, and the runs
that went on have ended there.
"""

import argparse
import contextlib
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from dataset_builders.errors import InputError
from dataset_builders.readers.source_files import ROOT_MARK
from dataset_builders.storage.files import check_database
from dataset_builders.storage.store import free_bytes, side_dir
from flows.cli.terminal import bytes_text
from flows.libraries.prefect_private import make_idle
from flows.pipeline.needs import fingerprints_in, registered
from flows.service.access import make_private_root
from flows.tracking.record import changed, load_record, records_dir
from flows.tracking.servers import mlflow_database, mlflow_files, prefect_home

_STAGES = ("evaluate", "export", "release")  # a version's run names all stages
_SECONDS = 60.0  # for a writer of a database
WENT_ON = "it went on when the backup was made; run it again"  # message of its state


def backup_command(args: argparse.Namespace) -> int:
    """Make the copy, and print what is in it.

    Raises:
        InputError: there is no such root, the directory is not new, the disk is too small, or a database is ruined.
    """
    root, to = side_dir(args.root).resolve(), args.directory.absolute()
    if not (root / ROOT_MARK).is_file():
        raise InputError(f"--root {args.root} is not a directory of earlier runs (no {ROOT_MARK}); give theirs")
    if (in_root := to.resolve().is_relative_to(root)) or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        new = (root if in_root else to).with_name("backup-1")
        raise InputError(f"{to} is {'in the root' if in_root else 'not empty'}; give a new directory, as {new}")
    databases = {mlflow_database(root): "mlflow.db", prefect_home(root) / "prefect.db": "prefect/prefect.db"}
    databases = {path: name for path, name in databases.items() if path.is_file() and path.stat().st_size}
    for path in databases:
        check_database(path, "what it held")
    records = {path: f"tracking/{path.name}" for path in sorted(records_dir(root).glob("[!.]*.json*"))}
    _check_room(to, [*databases, *records, *_named_files(root)])
    make_private_root(to)
    _copy(records, to)
    for path, name in databases.items():
        (to / name).parent.mkdir(exist_ok=True)
        copy_database(path, to / name)
    _end_open_runs(to)
    files = _named_files(root)  # again, since the copied database may name files that are new
    _copy({path: str(path.relative_to(root)) for path in files}, to)
    size = sum(path.lstat().st_size for path in {p.stat().st_ino: p for p in _files(to)}.values())
    held = [*databases.values(), f"{len(records)} files of records", f"{len(files)} other files"]
    print(f"{to}: {bytes_text(size)}: {', '.join(held)}")
    print("It is a root: give it as --root, or copy it to the old place with `cp -a`")
    return 0


def _end_open_runs(to: Path) -> None:
    """End the runs that went on when their records and databases were copied. Their processes, which may be on another
    host, know nothing of the copy."""
    for path in records_dir(to).glob("[!.]*.json"):
        with contextlib.suppress(ValueError):  # it cannot be read, which is said where it is needed
            if load_record(to, path.stem).status is None:
                with changed(to, path.stem) as record:
                    record.end("KILLED", record.changed_ms)
    if (prefect := to / "prefect/prefect.db").exists():
        make_idle(prefect, WENT_ON)


def _named_files(root: Path) -> list[Path]:
    """Return MLflow's files, and those of the artifacts that a registered version names."""
    versions, _ = registered(root, os.environ.get("MLFLOW_TRACKING_URI"))
    named = fingerprints_in(*(text for version in versions for text in version.texts))
    artifacts = [path for stage in _STAGES for path in sorted(root.glob(f"artifacts/{stage}/*")) if path.name in named]
    return [path for place in (mlflow_files(root), *artifacts) for path in _files(place)]


def _files(directory: Path) -> Iterator[Path]:
    """Yield all files below a directory. Links are not followed and left out."""
    for folder, _, names in os.walk(directory):
        for name in sorted(names):
            if not (path := Path(folder, name)).is_symlink():
                yield path


def _check_room(to: Path, files: list[Path]) -> None:
    sizes = {}
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            about = path.stat()
            sizes[about.st_ino] = about.st_size
    needed, free = sum(sizes.values()), free_bytes(to)
    if needed > free:
        raise InputError(f"{to}: {bytes_text(needed)} are wanted and {bytes_text(free)} are free; choose another disk")


def copy_database(source: Path, target: Path) -> None:
    """Copy a SQLite database that other processes may use, as it is at one moment.

    Raises:
        sqlite3.Error: it cannot be read, or the copy is not whole.
    """
    address = f"{source.resolve().as_uri()}?mode=ro"
    with (
        contextlib.closing(sqlite3.connect(address, _SECONDS, uri=True)) as open_source,
        contextlib.closing(sqlite3.connect(target)) as copy,
    ):
        open_source.backup(copy)
        (verdict,) = copy.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"{target}: {verdict}")


def _copy(files: Mapping[Path, str], to: Path) -> None:
    """Copy files to their names below a directory. What is one file under several names stays one."""
    copied: dict[tuple[int, int], Path] = {}
    for source, name in files.items():
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # a temporary file that has its final name now
            about = source.stat()
            first = copied.setdefault((about.st_dev, about.st_ino), target)
            if first is target:
                shutil.copy2(source, target)
            else:
                os.link(first, target)
