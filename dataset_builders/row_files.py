"""Which files of a source hold the rows of which subset, and reading them from any byte on.

A subset is a folder of files, or the files directly in the source that share a name but for a running number:

    source/chart_qa/train-00000.jsonl  train-00001.jsonl      subset chart_qa
    source/llava_mix.json                                     subset llava_mix
    source/train-00000-of-00002.jsonl  ...-00001-of-00002     subset train
    source/00000.tar  00001.tar                               subset data: nothing but the number is left of the name
"""

import dataclasses
import io
import re
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import StorePath, is_local
from dataset_builders.file_patterns import SourceFile, list_files, nearest
from dataset_builders.parts import Part, natural_order

NUMBERED = "data"  # the subset of files whose names are numbers

_RUNNING_NUMBER = re.compile(r"[-_.]?\d{4,}(-of-\d+)?$")
_STORE_BLOCK = 8 << 20  # bytes of one request to an object store


def subset_patterns(subsets: Sequence[str], suffixes: Sequence[str]) -> tuple[str, ...]:
    """Globs of the files of these subsets, of all without a name."""
    patterns = []
    for suffix in suffixes:
        for subset in subsets:
            patterns += [f"{subset}{suffix}", f"{subset}[-_.]*[0-9]{suffix}", f"{subset}/*{suffix}"]
            patterns += [f"[0-9]*{suffix}"] if subset == NUMBERED else []
        patterns += [] if subsets else [f"*{suffix}", f"*/*{suffix}"]
    return tuple(patterns)


def subset_files(
    source: StorePath, subsets: Sequence[str], suffixes: Sequence[str]
) -> list[tuple[str, list[SourceFile]]]:
    """(subset, its files) in natural order of the subsets' and the files' names.

    Raises:
        InputError: no such source or subset, no file, or a name that cannot be part of a key.
    """
    found: dict[str, list[SourceFile]] = {}
    for file in list_files(source, subset_patterns((), suffixes)):
        found.setdefault(_subset_of(file.name, suffixes), []).append(file)
    if not found:
        wanted = " or ".join(f"*{suffix}" for suffix in suffixes)
        raise InputError(f"raw data {source} holds neither {wanted} nor folders of them")
    for name in subsets:
        if name not in found:
            known = ", ".join(sorted(found))
            raise InputError(f"no subset {name!r} in {source}{nearest(name, found)}; there are: {known}")
    names = sorted(set(subsets) or found, key=natural_order)
    for name in names:
        if not name.isascii() or not name.replace("_", "").replace("-", "").isalnum():
            where = found[name][0].path
            raise InputError(f"{where}: subset {name!r} is no part of a key; rename it to letters, digits, _ and -")
    return [(name, found[name]) for name in names]


def span_parts(file: SourceFile, subset: str, spans: Iterable[tuple[int, int, int]]) -> list[Part]:
    """The parts of a file from (first byte, byte after the last, rows); its first row is number 0."""
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
            )
        )
        row += num_rows
    return parts


def parts_of_files(files: Iterable[SourceFile], parts_of: Callable[[SourceFile], list[Part]]) -> list[Part]:
    """The parts of a subset's files, rows numbered on from file to file."""
    parts: list[Part] = []
    first_row = 0
    for file in files:
        new = parts_of(file)
        parts += [dataclasses.replace(part, first_row=first_row + part.file_row) for part in new]
        first_row += sum(part.num_rows for part in new)
    return parts


def source_of(part: Part) -> StorePath:
    """The source directory that a part lies in."""
    return part.path.parents[part.name.count("/")]


def open_at(path: StorePath, offset: int = 0) -> BinaryIO:
    """The file opened at a byte; from an object store it is read in blocks, nothing else is held.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        if is_local(path):
            file = path.open("rb", buffering=1 << 20)
        else:
            remote = path.fs.open(path.path, "rb", block_size=_STORE_BLOCK, cache_type="readahead")
            file = io.BufferedReader(remote, 1 << 20)
        file.seek(offset)
        return file
    except (FileNotFoundError, PermissionError) as error:
        raise InputError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from error


def _subset_of(name: str, suffixes: Sequence[str]) -> str:
    """The folder, or for a file in the source itself its name without suffix and running number."""
    folder, _, base = name.rpartition("/")
    if folder:
        return folder
    suffix = max((s for s in suffixes if base.endswith(s)), key=len, default="")
    return _RUNNING_NUMBER.sub("", base.removesuffix(suffix)) or NUMBERED
