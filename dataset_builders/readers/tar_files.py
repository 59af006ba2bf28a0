"""The samples of a tar: runs of neighbouring members with the same name up to a dot. The tar is not unpacked.

Names are split as in webdataset: `a.b/c.0.jpg` is the field `0.jpg` of `a.b/c`, and fields are in lower case.
Directories, members whose file name begins with a dot, and members named `__like_this__` are not data. A link, a pipe
or a device is a member that cannot be read.

Members of one sample that are not neighbours would become incomplete samples. Such a tar is refused, and the message
has a command that sorts it.
"""

import errno
import re
import shlex
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import xxhash

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError, in_ascii, one_line
from dataset_builders.readers.source_files import open_at
from dataset_builders.storage.store import StorePath, is_local

_PART_ROWS = 512
_PART_BYTES = 256 << 20
_MAX_HEADER_BYTES = 1 << 20
_NAME = re.compile(r"((?:.*/|)[^./]+)[.]([^/]*)", re.DOTALL)
_NAMELESS = re.compile(r"(?:.*/|)[.]([a-z0-9]+|[A-Z0-9]+)", re.DOTALL)  # matches .txt, but not .DS_Store or ._a.jpg
_KINDS = {tarfile.SYMTYPE: "a symbolic link", tarfile.LNKTYPE: "a hard link", tarfile.FIFOTYPE: "a pipe"}
_META = re.compile(r"__[^/]*__($|/)")


@dataclass(slots=True)
class Group:
    """One sample's members."""

    name: str  # the common part of their names; "" for a member whose name is only a field, which is a group by itself
    start: int  # byte offset of the first member's header
    path: StorePath
    file: BinaryIO
    fields: dict[str, tarfile.TarInfo] = field(default_factory=dict)  # field name -> its member, in order
    twice: list[str] = field(default_factory=list)  # field names that occur more than once

    def check(self) -> None:
        """Raise SkipSample: no_name, or duplicate_key if a field occurs twice."""
        if not self.name:
            raise SkipSample("no_name", f"the member {next(iter(self.fields))[:100]!r} has no name before its field")
        if self.twice:
            raise SkipSample("duplicate_key", f"the member {self.twice[0][:100]!r} is there twice")

    def read(self, name: str, max_bytes: int, reason: str) -> bytes:
        """Return the content of a field; SkipSample for a link or a device, or with `reason` for over `max_bytes`."""
        member = self.fields[name]
        if not member.isreg() or member.issparse():
            kind = "a sparse file" if member.issparse() else _KINDS.get(member.type, "a device")
            way_out = "write the tar again with --dereference --hard-dereference"
            raise SkipSample("schema_error", f"the member {name[:100]!r} is {kind} and holds no bytes; {way_out}")
        if member.size > max_bytes:
            raise SkipSample(reason, f"{name!r} has {member.size} bytes; the limit is {max_bytes}")
        self.file.seek(member.offset_data)
        data = self.file.read(member.size)
        if len(data) != member.size:
            raise InputError(f"{self.path} became shorter while it was read; run the same command again")
        return data


def list_group_spans(path: StorePath) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte, byte after the last, samples) for each part of a tar, about 512 samples or 256 MiB."""
    start, rows, last = 0, 0, 0
    seen: set[int] = set()  # hashes of names, because a tar may hold millions of names
    with open_at(path) as file:
        reader = _TarReader(path, file)
        for group in reader.groups():
            name = xxhash.xxh3_64_intdigest(group.name.encode("utf-8", "surrogateescape"))
            if group.name and name in seen:
                raise _unsorted(path, group)
            seen.add(name)
            # No cut at a member without a name: it may be among the members of the sample before it.
            if group.name and (rows >= _PART_ROWS or (rows and last - start >= _PART_BYTES)):
                yield start, group.start, rows
                start, rows = group.start, 0
            rows, last = rows + 1, reader.end
        if rows:
            yield start, reader.end, rows


def _unsorted(path: StorePath, group: Group) -> InputError:
    tar = shlex.quote(str(path) if is_local(path) else path.name)
    where = "" if is_local(path) else ", on a copy of it"
    return InputError(
        f"{path}: the members of {in_ascii(group.name)!r} lie apart (again at byte {group.start}), so samples would "
        f"lack images or texts; sort the tar by names{where}: mkdir unpacked && tar -xf {tar} -C unpacked && "
        f"tar --sort=name -cf {tar} -C unpacked . && rm -r unpacked"
    )


def iter_groups(path: StorePath, span: tuple[int, int]) -> Iterator[Group]:
    """Yield the samples that begin in a span of bytes, which is one of `list_group_spans`."""
    with open_at(path, span[0]) as file:
        yield from _TarReader(path, file, span[1]).groups()


class _Headers:
    """The file as tarfile reads it: only headers, and at most _MAX_HEADER_BYTES even for a damaged header."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._read = file.seek, file.tell, file.read

    def read(self, size: int) -> bytes:
        return self._read(max(0, min(size, _MAX_HEADER_BYTES)))


class _TarReader:
    """The members of a tar from the file's current position up to byte `stop` or the tar's end."""

    def __init__(self, path: StorePath, file: BinaryIO, stop: int | None = None) -> None:
        self._path, self._file, self._stop = path, file, stop
        self.end = file.tell()  # later the offset after the last member that was read

    def groups(self) -> Iterator[Group]:
        group: Group | None = None
        nameless: list[Group] = []  # members without a name among the members of `group`; they are yielded after it
        for member in self._members():
            match = _NAME.fullmatch(member.name)
            if member.isdir() or _META.match(member.name):
                continue
            if match is None:
                if _NAMELESS.fullmatch(member.name):
                    nameless.append(Group("", member.offset, self._path, self._file, {member.name: member}))
                if group is None:
                    yield from nameless
                    nameless = []
                continue
            name, suffix = match[1], match[2].lower()
            if group is not None and group.name != name:
                yield from (group, *nameless)
                group, nameless = None, []
            if group is None:
                group = Group(name, member.offset, self._path, self._file)
            if suffix in group.fields:
                group.twice.append(suffix)
            group.fields[suffix] = member
        if group is not None:
            yield from (group, *nameless)

    def _members(self) -> Iterator[tarfile.TarInfo]:
        try:
            tar = tarfile.TarFile(fileobj=_Headers(self._file), mode="r")  # tarfile leaves the file open
            while self._stop is None or self.end < self._stop:
                member = tar.next()
                if member is None:
                    break
                tar.members.clear()  # otherwise tarfile keeps every header
                if tar.offset <= self.end:
                    raise tarfile.ReadError("a header that points backwards")
                self.end = tar.offset
                yield member
            if self._stop is None:
                # tarfile takes an unreadable header for the end of the tar. Only a block of zeros is one, as the format
                # says; anything else means that the tar was cut short or damaged.
                self._file.seek(self.end)
                block = self._file.read(tarfile.BLOCKSIZE)
                if len(block) < tarfile.BLOCKSIZE or block.count(0) != len(block):
                    raise self._broken("no end of the tar" if len(block) < tarfile.BLOCKSIZE else "no header there")
        except (InputError, MemoryError):
            raise
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise self._broken("a header that points to where no file reaches") from error
        except Exception as error:  # hostile headers make tarfile raise nearly any exception
            raise self._broken(one_line(error, 100) or type(error).__name__) from error

    def _broken(self, what: str) -> InputError:
        return InputError(f"{self._path} is cut or no tar: {what}, at byte {self.end}; download or write it again")
