"""The files of a source that match globs, with the same names for a directory, a single file and an object store.

Globs follow fsspec: `*` stays inside one directory, `**` does not. Files and directories whose names begin with a dot
belong to some tool and are not data.

A source may be untrusted and must not reach other files of this machine: a file whose links lead out of the source is
refused, and so is a link to a directory outside, before it is walked. An image is still listed then, because many
images are named by no row; a row that names it is left out (`image_refs.py`).
"""

import difflib
import itertools
import os
import re
from collections import deque
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
    """One file of a source."""

    path: StorePath
    name: str  # path below the source, with forward slashes
    stored: str = ""  # size and ETag in an object store, which change with the content; empty for a file on a disk


ROOT_MARK = ".athanor-root"  # a file of each directory into which athanor writes; it holds no raw data


def list_files(source: StorePath, patterns: Sequence[str], *, refuses_links_out: bool = True) -> list[SourceFile]:
    """Return the files below the source that match a pattern, in natural order of their names. The source is walked
    once. If it is one file, that file is returned, whatever the patterns are.

    Args:
        refuses_links_out: whether links out of the source are refused; False: those to directories are not followed.
    """
    if source.is_file():
        stored = "" if is_local(source) else _stored(source.fs.info(source.path))
        return [SourceFile(source, source.name, stored)]
    if is_local(source) and not source.is_dir():
        raise InputError(f"raw data {source} does not exist; give a directory, a file, a URL or a hub name")
    if is_local(source) and (source / ROOT_MARK).exists():
        raise InputError(f"raw data {source} is the --root of athanor; give the data, or another --root")
    globs = [re.compile(glob_translate(pattern)) for pattern in patterns]
    if is_local(source):
        found = _walk_disk(source, _tops(patterns), refuses_links_out)
    else:
        found = itertools.chain.from_iterable(_walk_store(source, top) for top in _tops(patterns))
    files = [file for file in found if any(glob.match(file.name) for glob in globs)]
    if is_local(source) and refuses_links_out:
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
            raise _leads_out(file.path, real, source)


def _leads_out(path: Path, real: Path, source: Path) -> InputError:
    return InputError(
        f"{path} leads by a link to {real}, outside of the source {source}; copy it there, delete the link, or give a "
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


def _walk_store(source: StorePath, top: str) -> Iterator[SourceFile]:
    """Yield every object below source/top that is not hidden."""
    scheme, root = str(source).partition("://")[0], source.path.rstrip("/")
    objects = source.fs.find((source / top if top else source).path, detail=True)
    for key, info in objects.items():
        name = key[len(root) + 1 :]
        if name and not any(part.startswith(".") for part in name.split("/")):
            yield SourceFile(location(f"{scheme}://{key}"), name, _stored(info))


def _walk_disk(source: Path, tops: Sequence[str], refuses_links_out: bool) -> Iterator[SourceFile]:
    """Yield every file below these directories that is not hidden and is in no root of athanor."""
    allowed = real_dirs(source)
    seen: set[tuple[int, int]] = set()
    # Links last, so that a directory is walked under its own name if that is in the walk, else under the first link.
    starts = deque(sorted((source / top for top in tops), key=lambda start: (start.is_symlink(), start)))
    while starts:
        start = starts.popleft()
        real = start.resolve()
        if not any(real.is_relative_to(directory) for directory in allowed):
            if refuses_links_out:
                raise _leads_out(start, real, source)
            continue
        # A link to a directory above it would be walked without an end.
        is_ring = start.is_symlink() and start.parent.resolve().is_relative_to(real)
        if is_ring or (start / ROOT_MARK).exists():
            continue
        for parent, directories, names in os.walk(start, onerror=_unreadable):
            about = os.stat(parent)
            if (about.st_dev, about.st_ino) in seen:
                directories.clear()
                continue
            seen.add((about.st_dev, about.st_ino))
            shown = [Path(parent, name) for name in sorted(directories) if not name.startswith(".")]
            starts += [path for path in shown if path.is_symlink()]
            directories[:] = [p.name for p in shown if not p.is_symlink() and not (p / ROOT_MARK).exists()]
            below = Path(parent).relative_to(source)
            files = [n for n in names if not n.startswith(".") and Path(parent, n).is_file()]
            yield from (SourceFile(Path(parent, name), (below / name).as_posix()) for name in files)


def _unreadable(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):  # the folder of a subset that is not there
        raise InputError(f"{error.filename} cannot be read: {error.strerror}; allow it, or move it away") from error


def _stored(info: dict) -> str:
    """Return size and ETag; if the store has no ETag, size and time of the last change."""
    return f"{info['size']}|{info.get('ETag') or info.get('LastModified') or info.get('mtime') or ''}"
