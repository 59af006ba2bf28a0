"""The files of a source: which match globs, to which subset each belongs, and opening one at any byte offset.

A file has the same name in a directory, as a single file and in an object store. Globs follow fsspec: `*` stays inside
one directory, `**` does not. Files and directories whose names begin with a dot belong to some tool and are not data.

A source may be untrusted and must not reach other files of this machine: a file whose links lead out of the source is
refused, and so is a link to a directory outside, before it is walked. An image or a video is still listed
then, because many are named by no row; a row that names it is left out (`image_refs.py`).

A subset is a folder of files, or the files directly in the source whose names differ only in a running number:

    source/chart_qa/train-00000.jsonl  train-00001.jsonl      subset chart_qa
    source/llava_mix.json                                     subset llava_mix
    source/train-00000-of-00002.jsonl  ...-00001-of-00002     subset train
    source/000.tar  001.tar                                   subset data: the names are only numbers
    source/vqa2.json                                          subset vqa2: no other file has this name with a number

In the name of a subset, `_` stands for each character that a key may not have: the rows of `my data.jsonl` are the
subset my_data. A number of four digits or more, or one with `-of-`, is always a running number. A shorter number is one
only if several files share the name. JSON files that datasets, img2dataset or Kaggle write about their data
(`dataset_info.json`, `state.json`, `00000_stats.json`, ...) hold no rows, and the caches of datasets
(`cache-...arrow`) hold rows again.
"""

import codecs
import dataclasses
import difflib
import io
import itertools
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fsspec.utils import glob_translate

from dataset_builders.contracts.sample import Split
from dataset_builders.errors import InputError, one_line
from dataset_builders.readers.parts import Part, natural_order
from dataset_builders.storage.store import StorePath, is_local, location

# Files of the last ones may be refused, each with its name.
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jfif", "jpe", "avif", "jp2")
VIDEO_SUFFIXES = ("mp4", "mkv", "webm", "avi", "mov", "m4v", "mpg", "mpeg", "flv", "wmv", "ogv", "3gp", "m2ts", "mts")
MEDIA_SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES)
ROOT_MARK = ".athanor-root"  # a file of each directory into which athanor writes; it holds no raw data
NUMBERED = "data"  # subset of the files whose names are only numbers

_RUNNING_NUMBER = re.compile(r"[-_.]?(?:(?P<sure>\d{4,}(?:-of-\d+)?|\d+-of-\d+)|\d+)$")
_STORE_BLOCK = 8 << 20  # bytes of one request to an object store
_START = 4096  # bytes that identify a text file
_NO_ROWS = re.compile(
    r"/((dataset_dict|dataset_infos?|dataset-metadata|state|\d+_stats)\.json|cache-[0-9a-f]{16}\w*\.arrow)$"
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a source."""

    path: StorePath
    name: str  # path below the source, with forward slashes
    stored: str = ""  # size and ETag in an object store, which change with the content; empty for a file on a disk


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
        if file.name.lower().endswith(MEDIA_SUFFIXES):
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


def real_dirs(source: Path) -> tuple[Path, ...]:
    """Return the directories that may hold a source's files: the source, and for a snapshot of the hub its blobs."""
    real = source.resolve()
    caches = [parent.parent for parent in (real, *real.parents) if parent.name == "snapshots"]
    return (real, *((cache / "blobs").resolve() for cache in caches[:1]))


def nearest(name: str, known: Collection[str]) -> str:
    """Return `; did you mean 'x'?`, or an empty text if no known name is similar."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def subset_patterns(subsets: Sequence[str], suffixes: Sequence[str]) -> tuple[str, ...]:
    """Return globs of the files of these subsets; no subset means all."""
    patterns = []
    for suffix in suffixes:
        for subset in (name.replace("_", "?") for name in subsets):  # see `_key_name`
            numbered = [f"{subset}[-_.]*[0-9]{suffix}", f"{subset}[0-9]*{suffix}"]
            patterns += [f"{subset}{suffix}", *numbered, f"{subset}/*{suffix}"]
            patterns += [f"[0-9]*{suffix}"] if subset == NUMBERED else []
        patterns += [] if subsets else [f"*{suffix}", f"*/*{suffix}"]
    return tuple(patterns)


def subset_files(
    source: StorePath, subsets: Sequence[str], suffixes: Sequence[str]
) -> list[tuple[str, list[SourceFile]]]:
    """Return (subset, its files) in natural order of the subsets' and the files' names."""
    files_of: dict[str, list[SourceFile]] = {}
    found = [file for file in list_files(source, subset_patterns((), suffixes)) if may_hold_rows(file.name)]
    for file, subset in zip(found, _subsets_of([file.name for file in found], suffixes)):
        files_of.setdefault(subset, []).append(file)
    if not files_of:
        globs = " or ".join(f"*{suffix}" for suffix in suffixes)
        deep = [each for each in list_files(source, [f"**/*{s}" for s in suffixes]) if may_hold_rows(each.name)]
        way_out = f"; {deep[0].name} lies too deep: give {deep[0].path.parent.parent} as the data" if deep else ""
        raise InputError(f"raw data {source} holds neither {globs} nor folders of them{way_out}")
    return choose_subsets(source, subsets, files_of)


def row_parts(
    source: StorePath,
    subsets: Sequence[str],
    suffixes: Sequence[str],
    parts_of: Callable[[SourceFile, str], list[Part]],
) -> list[Part]:
    """Return the parts of all files of rows, in order of subsets, files and rows. `parts_of` cuts one file."""
    chosen = subset_files(source, subsets, suffixes)
    return [part for subset, files in chosen for part in number_on(parts_of(file, subset) for file in files)]


def may_hold_rows(name: str) -> bool:
    """Whether a file is none of those that tools write about their data, or as a cache."""
    return not _NO_ROWS.search(f"/{name}")


def choose_subsets(
    source: StorePath, subsets: Sequence[str], files_of: Mapping[str, list[SourceFile]]
) -> list[tuple[str, list[SourceFile]]]:
    """Return (subset, its files) of these subsets, in natural order of their names; no subset means all. `files_of` has
    the names of folders or files as they are, with characters that a key may not have."""
    names_of: dict[str, str] = {}
    for name in files_of:
        if not name.isprintable():  # it is not UTF-8, or holds control characters
            raise InputError(f"{files_of[name][0].path}: subset {name!r} cannot be part of a key; rename it")
        if (other := names_of.setdefault(_key_name(name), name)) != name:
            raise InputError(f"{source}: {other!r} and {name!r} would both be the subset {_key_name(name)}; rename one")
    files_of = {subset: files_of[name] for subset, name in names_of.items()}
    for name in subsets:
        if name not in files_of:
            known = ", ".join(sorted(files_of))
            raise InputError(f"no subset {name!r} in {source}{nearest(name, files_of)}; there are: {known}")
    return [(name, files_of[name]) for name in sorted(set(subsets) or files_of, key=natural_order)]


def _key_name(name: str) -> str:
    """Return the name of the subset of a folder or file: letters and digits of ASCII, _ and -."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def check_subset_name(name: str, path: StorePath) -> None:
    """Raise InputError for a subset, found at `path`, whose name cannot be part of a key."""
    if not name.isascii() or not name.replace("_", "").replace("-", "").isalnum():
        raise InputError(
            f"{path}: subset {name!r} cannot be part of a key; rename it, with letters, digits, _ and - alone"
        )


def span_parts(
    file: SourceFile, subset: str, spans: Iterable[tuple[int, int, int]], split: Split | None = None
) -> list[Part]:
    """Return the parts of a file from (start, end, rows) of each, in the builder's units; its first row is number 0."""
    parts: list[Part] = []
    row = 0
    for start, end, num_rows in spans:
        parts.append(
            Part(
                path=file.path,
                name=file.name,
                subset=subset,
                span=(start, end),
                first_row=row,
                file_row=row,
                num_rows=num_rows,
                split=split,
            )
        )
        row += num_rows
    return parts


def file_parts(
    files: Sequence[SourceFile], subset: str, split: Callable[[str], Split | None], most: int
) -> Iterator[Part]:
    """Yield the parts of a subset whose rows are files, of at most `most` rows and of one split each.

    Args:
        split: the split of a file by its name.
    """
    first_row = 0
    for own, run in itertools.groupby(files, lambda file: split(file.name)):
        of_split = list(run)
        for start in range(0, len(of_split), most):
            chosen = of_split[start : start + most]
            yield Part(
                path=chosen[0].path,
                name=chosen[0].name,
                subset=subset,
                span=(first_row, first_row + len(chosen)),
                first_row=first_row,
                file_row=0,
                num_rows=len(chosen),
                split=own,
                files=tuple(file.name for file in chosen),
            )
            first_row += len(chosen)


def number_on(files: Iterable[list[Part]]) -> list[Part]:
    """Return the parts of all files of a subset, with row numbers that continue from file to file."""
    parts: list[Part] = []
    first_row = 0
    for file_parts in files:
        parts += [dataclasses.replace(part, first_row=first_row + part.file_row) for part in file_parts]
        first_row += sum(part.num_rows for part in file_parts)
    return parts


def open_at(path: StorePath, offset: int = 0, size: int = _STORE_BLOCK) -> BinaryIO:
    """Open a file at a byte offset. A file in an object store is read in blocks of at most `size` bytes; one block is
    in memory."""
    try:
        if is_local(path):
            file = path.open("rb", buffering=1 << 20)
        else:
            remote = path.fs.open(path.path, "rb", block_size=min(size, _STORE_BLOCK), cache_type="readahead")
            file = io.BufferedReader(remote, min(size, 1 << 20))
        file.seek(offset)
        return file
    except (FileNotFoundError, PermissionError) as error:
        raise InputError(f"{path} cannot be read: {one_line(error)}") from error


def text_start(path: StorePath) -> bytes:
    """Return the first bytes of a text file, _START at most; InputError if it is UTF-16 or compressed."""
    with open_at(path, size=_START) as file:
        start = file.read(_START)
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(f"{path} is UTF-16; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
    if start.startswith(b"\x1f\x8b"):
        raise InputError(f"{path} is compressed by gzip; unpack it (gunzip)")
    return start


def became_shorter(part: Part, row: int) -> InputError:
    """Return the error for a file that now ends before `row` of the subset, although that row was counted."""
    at = row - part.first_row + part.file_row
    return InputError(f"{part.path} became shorter while it was read, before row {at}; run the same command again")


def _subsets_of(names: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Return the folder of each file; for a file directly in the source, its name without suffix and running number."""
    stems = [name.removesuffix(max((s for s in suffixes if name.endswith(s)), key=len, default="")) for name in names]
    numbers = [None if "/" in stem else _RUNNING_NUMBER.search(stem) for stem in stems]
    bare = [stem[: number.start()] if number else "" for stem, number in zip(stems, numbers)]
    shared = Counter(name for name, number in zip(bare, numbers) if number)
    subsets = []
    for stem, number, name in zip(stems, numbers, bare):
        is_running = number is not None and (number["sure"] is not None or shared[name] > 1)
        subsets.append(name or NUMBERED if is_running else stem.rpartition("/")[0] or stem)
    return subsets


def _tops(patterns: Sequence[str]) -> list[str]:
    """Return the directories to walk: the parts of patterns before the first wildcard, none inside another."""
    literal = set()
    for pattern in patterns:
        directories = pattern.split("/")[:-1]
        literal.add("/".join(itertools.takewhile(lambda name: not set(name) & set("*?["), directories)))
    tops: list[str] = []
    for top in sorted(literal):
        if not any(top == other or other == "" or top.startswith(other + "/") for other in tops):
            tops.append(top)
    return tops


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


def content_stamp(path: StorePath) -> str:
    """Return a text that changes when a file does: size and time on a disk, size and ETag in a store."""
    if is_local(path):
        about = path.stat()
        return f"{about.st_size}|{about.st_mtime_ns}"
    return _stored(path.fs.info(path.path))


def _stored(info: dict) -> str:
    """Return size and ETag; if the store has no ETag, size and time of the last change."""
    return f"{info['size']}|{info.get('ETag') or info.get('LastModified') or info.get('mtime') or ''}"
