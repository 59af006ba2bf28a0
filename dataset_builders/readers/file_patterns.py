"""The files of a source that match globs, with the same names for a directory, a single file and an object store.

Globs follow fsspec: `*` stays inside one directory, `**` does not. Files and directories whose names begin with a dot
belong to some tool and are not data.

A source may be untrusted and must not reach other files of this machine: a file whose links lead out of the source is
refused. An image is still listed then,
because many images are named by no row; a row that names it is left out (`image_refs.py`).
"""

import difflib
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsspec.utils import glob_translate

from dataset_builders.errors import InputError
from dataset_builders.readers.image_refs import real_dirs
from dataset_builders.readers.parts import natural_order
from dataset_builders.readers.unread import IMAGE_SUFFIXES
from dataset_builders.storage.store import StorePath, is_local, location


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source.

    Attributes:
        path: location of the file.
        name: path below the source, with forward slashes.
        stored: size and ETag in an object store, which change with the content; empty for a file on a disk.
    """

    path: StorePath
    name: str
    stored: str = ""


ROOT_MARK = ".athanor-root"  # a file of each directory into which athanor writes; it holds no raw data


def list_files(source: StorePath, patterns: Sequence[str]) -> list[SourceFile]:
    """Return the files below the source that match a pattern, in natural order of their names. The source is walked
    once.

    If the source is one file, that file is returned, whatever the patterns are.

    Raises:
        InputError: there is no such directory or file, or a file is a link that leads out of the source.
    """
    if source.is_file():
        stored = "" if is_local(source) else _stored(source.fs.info(source.path))
        return [SourceFile(source, source.name, stored)]
    if is_local(source) and not source.is_dir():
        raise InputError(f"raw data {source} does not exist; give a directory, a file, a URL or a hub name")
    if is_local(source) and (source / ROOT_MARK).exists():
        raise InputError(f"raw data {source} is the --root of athanor; give the data, or another --root")
    globs = [re.compile(glob_translate(pattern)) for pattern in patterns]
    files = [f for top in _tops(patterns) for f in _walk(source, top) if any(glob.match(f.name) for glob in globs)]
    if is_local(source):
        _refuse_links_out(source, files)
    return sorted(files, key=lambda file: natural_order(file.name))


def _refuse_links_out(source: Path, files: Sequence[SourceFile]) -> None:
    allowed = real_dirs(source)
    real_parents: dict[Path, Path] = {}
    for file in files:
        if file.name.lower().endswith(IMAGE_SUFFIXES):
            continue
        parent = file.path.parent
        if parent not in real_parents:
            real_parents[parent] = parent.resolve()
        real = file.path.resolve() if file.path.is_symlink() else real_parents[parent] / file.path.name
        if not any(real.is_relative_to(directory) for directory in allowed):
            raise InputError(
                f"{file.path} leads by a link to {real}, outside of the source {source}; copy it there, or give a "
                "source that holds it"
            )


def nearest(name: str, known: Collection[str]) -> str:
    """Return `; did you mean 'x'?`, or an empty text if no known name is similar."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _tops(patterns: Sequence[str]) -> list[str]:
    """Return the directories to walk: the parts of patterns before the first wildcard, none inside another."""
    tops: list[str] = []
    for top in sorted({_literal_part(pattern) for pattern in patterns}):
        if not any(top == other or other == "" or top.startswith(other + "/") for other in tops):
            tops.append(top)
    return tops


def _literal_part(pattern: str) -> str:
    directories = pattern.split("/")[:-1]
    wild = next((i for i, name in enumerate(directories) if set(name) & set("*?[")), len(directories))
    return "/".join(directories[:wild])


def _walk(source: StorePath, top: str) -> Iterator[SourceFile]:
    """Yield every file below source/top that is not hidden."""
    if is_local(source):
        yield from _walk_disk(source, source / top)
        return
    scheme, root = str(source).partition("://")[0], source.path.rstrip("/")
    objects = source.fs.find((source / top if top else source).path, detail=True)
    for key, info in objects.items():
        name = key[len(root) + 1 :]
        if name and not any(part.startswith(".") for part in name.split("/")):
            yield SourceFile(location(f"{scheme}://{key}"), name, _stored(info))


def _walk_disk(source: Path, top: Path) -> Iterator[SourceFile]:
    """Yield every file below a directory that is in no root of athanor. Links are followed, except to a parent."""
    for parent, directories, names in os.walk(top, followlinks=True):
        directories[:] = [d for d in directories if not d.startswith(".") and not _is_left_out(Path(parent, d))]
        below = Path(parent).relative_to(source)
        files = [n for n in names if not n.startswith(".") and Path(parent, n).is_file()]
        yield from (SourceFile(Path(parent, name), (below / name).as_posix()) for name in files)


def _is_left_out(directory: Path) -> bool:
    """Whether a directory is a root of athanor, or a link to one of its parents."""
    is_loop = directory.is_symlink() and directory.parent.resolve().is_relative_to(directory.resolve())
    return is_loop or (directory / ROOT_MARK).exists()


def _stored(info: dict) -> str:
    """Return size and ETag; if the store has no ETag, size and time of the last change."""
    return f"{info['size']}|{info.get('ETag') or info.get('LastModified') or info.get('mtime') or ''}"
