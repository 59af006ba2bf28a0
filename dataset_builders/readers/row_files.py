"""The assignment of a source's files to subsets, the numbering of their rows, and opening a file at any byte offset.

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
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO

from dataset_builders.contracts.sample import Split
from dataset_builders.errors import InputError, one_line
from dataset_builders.readers.file_patterns import SourceFile, list_files, nearest
from dataset_builders.readers.parts import Part, natural_order
from dataset_builders.storage.store import StorePath, is_local

NUMBERED = "data"  # subset of the files whose names are only numbers

_RUNNING_NUMBER = re.compile(r"[-_.]?(?:(?P<sure>\d{4,}(?:-of-\d+)?|\d+-of-\d+)|\d+)$")
_STORE_BLOCK = 8 << 20  # bytes of one request to an object store
_START = 4096  # bytes that identify a text file
_NO_ROWS = re.compile(
    r"/((dataset_dict|dataset_infos?|dataset-metadata|state|\d+_stats)\.json|cache-[0-9a-f]{16}\w*\.arrow)$"
)


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
