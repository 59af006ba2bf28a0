"""Access to a local directory or an object store through one kind of path.

A local path is a pathlib.Path. A URL (`s3://bucket/prefix`) is a UPath, which has the same methods and goes through
fsspec's driver for its protocol. Keys and endpoints come from that driver's own environment variables
(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, ...). An object store has no rename and no lock, but an
upload is atomic. A directory is finished when its manifest exists.

Reads from a store go through a bounded cache on this machine's disk. Every hit is checked.

    $ATHANOR_CACHE_DIR (default ~/.cache/athanor)
        ranges/ab/<key>    8 bytes of checksum and the bytes of one range
        files/ab/<key>/    one whole file under its own name, and a file with its checksum
        uploads/           files that are being uploaded
        roots/             local files of a root in a store: locks and unfinished work; in tree/, a copied directory

Ranges, files and trees together take at most $ATHANOR_CACHE_GB (default 20). The least recently used entries are
deleted first. A tree is kept for at least a day after its last use, because programs open its files one by one. Several
processes share the cache without locks: entries appear by a rename, and a missing or damaged entry is fetched again.
"""

import functools
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import BeforeValidator, PlainSerializer
from upath import UPath

from dataset_builders.errors import DamagedFile, InputError, damaged, one_line

StorePath = Path | UPath

_EXTRAS = {"s3": "s3", "s3a": "s3"}
# Matches user:password@ in any URL (not host:port/...@...), or only key@ where an address has nothing else before an @.
# A password with an unescaped / in it matches as a whole.
_USERINFO = re.compile(
    r"([a-z][a-z0-9+.-]*://)[^\s/@:\"'<>]*:(?!\d+(?:[/?#\s]|$))[^\s\"'<>]*@|((?:s3a?|gs|gcs|https?)://)[^\s/@:\"'<>]+@",
    re.I,
)
_TRIES = 5
_FIRST_WAIT = 0.2  # seconds; doubled after each try
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # another try is useless

_CHECK_EVERY = 1 / 16  # share of the bound that a process adds before it checks the size of the whole cache
_KEEP = 0.9  # share of the bound that remains after a clean-up
_CHECKSUM_BYTES = 8
TREE, WHOLE = "tree", ".whole"  # a copied directory, and the file in it that marks it as complete
_TREE_KEPT = 86_400.0  # seconds that a tree is kept after its last use

_added: dict[Path, int] = {}  # bytes that this process has added since its last check

Result = TypeVar("Result")


def location(text: str | os.PathLike[str]) -> StorePath:
    """Return the path for a text: a local path, or a URL.

    Raises InputError for an empty text, a URL with credentials or without an installed driver, and an unknown `~name`.
    """
    if isinstance(text, UPath | Path):
        return text
    text = os.fspath(text)
    check_no_userinfo(text)
    protocol, mark, rest = text.partition("://")
    if not mark:
        return home_expanded(text)
    if protocol in ("file", "local"):
        return Path(rest)
    try:
        path = UPath(text, use_listings_cache=False)  # a cached listing would miss files of other processes
        assert path.fs is not None  # loads the driver
    except (ImportError, ValueError) as error:
        extra = f"pip install -e '.[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else f"install fsspec's {protocol}"
        raise InputError(f"{text}: no driver for {protocol}:// is installed ({error}); {extra}") from error
    return path


def home_expanded(text: str) -> Path:
    """Return a local path with `~` or `~name` replaced by the user's home."""
    if not text:
        raise InputError("the path is empty; give a directory")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(
            f"{text!r}: there is no user {text.split('/')[0]} on this machine; give the whole path"
        ) from error


def check_no_userinfo(text: str, what: str = "") -> None:
    """Refuse a URL with a password, which would appear in logs, manifests and databases; `what` is the URL's field."""
    if without_userinfo(text) != text:
        raise InputError(
            f"{what}{'=' if what else ''}{without_userinfo(text)}: a URL must not carry a key or password, which would "
            "be in logs and records; put credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ...)"
        )


def without_userinfo(text: str) -> str:
    """Return a text with the credentials of its URLs replaced by `...`; `abfs://container@account` has no credentials.

    >>> without_userinfo("postgresql://me:secret@host/runs")
    'postgresql://...@host/runs'
    """
    return _USERINFO.sub(lambda match: f"{match[1] or match[2]}...@", text)


Location = Annotated[Any, BeforeValidator(location), PlainSerializer(str)]  # a StorePath as a field of a config


def absolute(path: StorePath) -> StorePath:
    """Return the path without links and relative parts; a URL is returned unchanged."""
    if not is_local(path):
        return path
    try:
        return path.resolve()
    except RuntimeError as error:  # pathlib's own error for a circle of links
        raise InputError(f"{path} is a symbolic link that leads back to itself; give another directory") from error
    except FileNotFoundError as error:
        raise InputError(f"{path} is in a working directory that was deleted; cd to another one") from error


def is_local(path: StorePath) -> bool:
    """Whether the path is in this machine's file system and not a URL."""
    return isinstance(path, Path)


def check_reachable(path: StorePath) -> None:
    """Check that a store answers and grants access; a local path always passes."""
    if is_local(path):
        return
    try:
        path.exists()
    except Exception as error:  # every driver raises its own kinds of errors
        why = one_line(error) or type(error).__name__
        raise InputError(
            f"{path} cannot be reached ({why}); give its keys and endpoint in the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL for s3://), or a local directory"
        ) from error


def publish(local: Path, path: StorePath) -> None:
    """Move a complete local file to its final path: by a rename, or by an upload that is visible only when complete."""
    if is_local(path):
        os.replace(local, path)
        return

    def upload() -> None:
        path.fs.put_file(str(local), path.path)
        arrived, size = path.fs.info(path.path)["size"], local.stat().st_size
        if arrived != size:
            raise OSError(f"{path}: {arrived} bytes arrived of {size}")

    _with_retries(upload, f"write {path}")
    local.unlink()


def read_range(path: StorePath, offset: int, size: int, checksum: int | None = None) -> bytes:
    """Return bytes [offset, offset + size) of a file; a range from a store is read through the cache.

    Raises DamagedFile if there is no such file, it ends too early, or the bytes have another xxh3_64 than `checksum`.
    """

    def checked(data: bytes) -> bytes:
        if len(data) != size:
            raise damaged(path, f"is cut short: {len(data)} of {size} bytes are left at byte {offset}")
        if checksum is not None and xxhash.xxh3_64_intdigest(data) != checksum:
            raise damaged(path, f"is damaged: the {size} bytes at byte {offset} are not the ones that were written")
        return data

    try:
        if is_local(path):
            with path.open("rb", buffering=0) as file:
                return checked(os.pread(file.fileno(), size, offset))
        fetch = functools.partial(path.fs.cat_file, path.path, start=offset, end=offset + size)
        # Compared inside the retries, since a connection that is cut also gives too few bytes.
        return LocalCache().read(
            f"{path}#{offset}+{size}", lambda: _with_retries(lambda: checked(fetch()), f"read {path}")
        )
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error


def local_copy(path: StorePath, sha256: str | None = None) -> Path:
    """Return a file that other libraries can open by name: the file itself, or a copy in this machine's cache.

    Raises DamagedFile if the file has another SHA-256 than `sha256`. A copy is compared after its download only, a
    local file at each call.
    """
    if is_local(path):
        if sha256 is not None:
            _check_sha256(path, path, sha256)
        return path
    info = _with_retries(lambda: path.fs.info(path.path), f"look at {path}")
    version = info.get("ETag") or info.get("LastModified") or info.get("mtime") or ""
    size = info["size"]

    def download(target: Path) -> None:
        _with_retries(lambda: path.fs.get_file(path.path, str(target)), f"read {path}")
        if target.stat().st_size != size:
            raise OSError(f"{path}: {target.stat().st_size} bytes arrived of {size}")
        if sha256 is not None:
            _check_sha256(target, path, sha256)

    return LocalCache().file(f"{path}#{version}#{size}", path.name, download)


def _check_sha256(copy: Path, path: StorePath, sha256: str) -> None:
    """Raise DamagedFile if the file `path`, whose content is in `copy`, has another SHA-256 or is missing."""
    try:
        with copy.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error
    if digest != sha256:
        raise damaged(path, f"is damaged: its SHA-256 is {digest[:12]}..., and {sha256[:12]}... was written")


def local_dir(path: StorePath) -> Path:
    """Return a directory that other libraries can open by name: the directory itself, or a copy in the cache, which may
    be deleted a day after its last use."""
    if is_local(path):
        return path
    target = side_dir(path) / TREE
    # A finished directory in a store never changes, so a complete copy is not compared again.
    if (target / WHOLE).is_file():
        os.utime(target / WHOLE)
        return target
    for file in walk_files(path):
        place = target / _name_below(file, path)
        if place.is_file() and place.stat().st_size == file.stat().st_size:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        tmp = path_beside(place)
        _with_retries(lambda file=file, tmp=tmp: file.fs.get_file(file.path, str(tmp)), f"read {file}")
        os.replace(tmp, place)
    target.mkdir(parents=True, exist_ok=True)
    (target / WHOLE).touch()
    LocalCache().count(sum(file.stat().st_size for file in target.rglob("*") if file.is_file()))
    return target


def side_dir(path: StorePath) -> Path:
    """Return the local directory that belongs to a path: itself, or for a URL one below the cache directory."""
    if is_local(path):
        return path
    name = "".join(c if c.isalnum() else "-" for c in path.name)[:40]
    return cache_dir() / "roots" / f"{name}-{xxhash.xxh3_64_hexdigest(str(path).rstrip('/').encode())}"


def upload_dir(local: Path, path: StorePath, last: str) -> None:
    """Upload every file of a local directory to a store, the file named `last` after all others."""
    names = sorted(str(file.relative_to(local)) for file in local.rglob("*") if file.is_file())
    for name in [*(n for n in names if n != last), last]:
        target = path / name
        # What an earlier try has uploaded is not sent again; the manifest is, since it marks the directory as finished.
        if not (name != last and target.is_file() and target.stat().st_size == (local / name).stat().st_size):
            # `publish` deletes its file, so the file gets a second name first.
            copy = cache_dir() / "uploads" / f"{os.getpid()}-{Path(name).name}.tmp"
            copy.parent.mkdir(parents=True, exist_ok=True)
            can_link = local.stat().st_dev == copy.parent.stat().st_dev
            os.link(local / name, copy) if can_link else shutil.copyfile(local / name, copy)
            publish(copy, target)


def make_dir(path: StorePath) -> None:
    """Create a directory and its parents; a store needs no directories."""
    if is_local(path):
        path.mkdir(parents=True, exist_ok=True)


def modified(path: StorePath) -> float:
    """Return the time of a file's last change, in seconds since 1970."""
    return path.stat().st_mtime if is_local(path) else path.fs.modified(path.path).timestamp()


def remove_tree(path: StorePath) -> None:
    if is_local(path):
        shutil.rmtree(path)
    elif path.exists():
        path.fs.rm(path.path, recursive=True)


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the disk on which a directory is or would be made."""
    directory = directory.absolute()
    return shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free


DOOMED = "deleting-"  # start of the name of a local directory that is being deleted


def rename_doomed(directory: Path) -> Path:
    """Rename a local directory that is to be deleted, so that an interrupted deletion leaves nothing that looks whole,
    and return its new path."""
    return directory.rename(directory.with_name(f"{DOOMED}{directory.name}"))


def walk_files(path: StorePath) -> list[StorePath]:
    """Return every file below a directory, sorted by name."""
    if is_local(path):
        files = [file for file in path.rglob("*") if file.is_file()]
    else:
        scheme = str(path).partition("://")[0]
        files = [location(f"{scheme}://{name}") for name in path.fs.find(path.path)]
    return sorted(files, key=str)


def _name_below(file: StorePath, directory: StorePath) -> str:
    """Return the file's name below the directory; refuse keys of a store that contain `..` or begin with /."""
    name = str(file)[len(str(directory).rstrip("/")) + 1 :]
    if name.startswith("/") or ".." in name.split("/"):
        raise InputError(
            f"{directory} holds an object named {name!r}, which is not a file below it; delete that object"
        )
    return name


def _with_retries(action: Callable[[], Result], what: str) -> Result:
    """Call `action`, and again after a broken connection, but not if a file is missing or forbidden."""
    wait = _FIRST_WAIT
    for attempt in range(_TRIES):
        try:
            return action()
        except _FINAL:
            raise
        except Exception as error:  # every driver raises its own kinds of errors
            if attempt == _TRIES - 1 and isinstance(error, DamagedFile):  # the file in the store itself is damaged
                raise
            if attempt == _TRIES - 1:
                raise OSError(f"cannot {what}, tried {_TRIES} times: {one_line(error, 300)}") from error
        time.sleep(wait)
        wait *= 2
    raise AssertionError("unreachable")


def cache_dir() -> Path:
    """Return the directory of all data that can be fetched again."""
    return Path(os.environ.get("ATHANOR_CACHE_DIR") or Path.home() / ".cache" / "athanor")


def cache_bound() -> int:
    """Return the number of bytes that the cache may take."""
    text = os.environ.get("ATHANOR_CACHE_GB") or "20"
    try:
        bound = int(float(text) * 1e9)
    except ValueError:
        bound = 0
    if bound <= 0:
        raise InputError(f"ATHANOR_CACHE_GB={text} is not a positive number of gigabytes; try ATHANOR_CACHE_GB=20")
    return bound


class LocalCache:
    """The cache below `directory`, limited to `bound` bytes."""

    def __init__(self, directory: Path | None = None, bound: int | None = None) -> None:
        self.directory = directory or cache_dir()
        self.bound = bound or cache_bound()

    def read(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """Return the bytes of a key; fetch them if they are missing or damaged in the cache."""
        place = self._place("ranges", key)
        try:
            stored = place.read_bytes()
        except OSError:
            stored = b""
        data = stored[_CHECKSUM_BYTES:]
        if len(stored) >= _CHECKSUM_BYTES and xxhash.xxh3_64_digest(data) == stored[:_CHECKSUM_BYTES]:
            _touch(place)
            return data
        data = fetch()
        if len(data) <= self.bound * _CHECK_EVERY:  # one larger range would push out everything else
            tmp = path_beside(place)
            tmp.write_bytes(xxhash.xxh3_64_digest(data) + data)
            os.replace(tmp, place)
            self.count(len(data))
        return data

    def file(self, key: str, name: str, download: Callable[[Path], None]) -> Path:
        """Return a local file `name` with the content of a key; download it if the cached one is missing or damaged."""
        place = self._place("files", key)
        file, record = place / name, place / (name + ".xxh3")
        if file.is_file() and record.is_file() and record.read_text() == _checksum(file):
            _touch(record)
            return file
        place.mkdir(exist_ok=True)
        tmp = path_beside(file)
        try:
            download(tmp)
            checksum, size = _checksum(tmp), tmp.stat().st_size
            os.replace(tmp, file)
        finally:
            tmp.unlink(missing_ok=True)
        tmp = path_beside(record)
        tmp.write_text(checksum)
        os.replace(tmp, record)
        self.count(size)
        return file

    def _place(self, kind: str, key: str) -> Path:
        name = xxhash.xxh3_128_hexdigest(key.encode())
        place = self.directory / kind / name[:2] / name
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def count(self, size: int) -> None:
        """Record that bytes were added to the cache, and delete old entries if the cache is over its bound."""
        _added[self.directory] = _added.get(self.directory, 0) + size
        if _added[self.directory] > self.bound * _CHECK_EVERY:
            _added[self.directory] = 0
            self._make_room()

    def _make_room(self) -> None:
        """Delete the least recently used entries until `_KEEP` of the bound is left."""
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        if total <= self.bound * (1 - _CHECK_EVERY):  # every process may add its share before it checks again
            return
        for used, size, place in entries:
            if total <= self.bound * (_KEEP - _CHECK_EVERY):
                return
            if place.name == TREE and used > time.time() - _TREE_KEPT:
                continue
            shutil.rmtree(place, ignore_errors=True) if place.is_dir() else place.unlink(missing_ok=True)
            total -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Yield (last use, bytes, path) of every entry."""
        places = [place for kind in ("ranges", "files") for place in (self.directory / kind).glob("??/*")]
        trees = (self.directory / "roots").glob(f"*/{TREE}")
        for place in (*places, *(tree for tree in trees if (tree / WHOLE).is_file())):
            try:
                parts = [part for part in place.rglob("*") if part.is_file()] if place.is_dir() else [place]
                stats = [part.stat() for part in parts]
            except FileNotFoundError:  # another process deletes entries too
                continue
            if stats:
                yield max(s.st_mtime for s in stats), sum(s.st_size for s in stats), place


def _touch(place: Path) -> None:
    try:
        os.utime(place)
    except OSError:  # deleted since it was read
        return


def path_beside(place: Path) -> Path:
    """Return a path in the same directory for a temporary file, which no other writer uses."""
    return place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.tmp")


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
