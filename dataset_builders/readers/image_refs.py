"""Reading of an image or a video that a row only names, by a data URI, a path, or the address of an object in a store.

    data:image/png;base64,iVBORw0...     decoded; also percent-encoded, without ;base64
    iVBORw0KGgo..., /9j/4AAQ...          base64 of PNG, JPEG, GIF or WebP without a head
    coco/000000033471.jpg                relative to the file that names it, or to `image_root` below the source; a path
                                         of Windows, coco\\000000033471.jpg, is read too
    s3://bucket/pictures/1.jpg           read from that store, if rows may name it (`storage/row_objects.py`)

A path must be inside the source after `..` and symbolic links are resolved: rows are untrusted and must not reach other
files of this machine. Web addresses are refused: their content changes, and a slow or missing server would decide which
samples are trained on.
"""

import base64
import binascii
import errno
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote_to_bytes

from pydantic import Field

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import InputError, one_line
from dataset_builders.readers.parts import Part
from dataset_builders.readers.source_files import MEDIA_SUFFIXES, real_dirs
from dataset_builders.storage.row_objects import NoObject, read_object
from dataset_builders.storage.store import StorePath, is_local

MAX_IMAGE_BYTES = 256 << 20
MAX_VIDEO_BYTES = 2 << 30
# Globs of image and video files, in letters of either case. A row may also name a file with another suffix, or none.
MEDIA_PATTERNS = tuple(
    f"{folder}*." + "".join(f"[{c}{c.upper()}]" if c.isalpha() else c for c in suffix)
    for suffix in MEDIA_SUFFIXES
    for folder in ("", "**/")
)
# Files with these suffixes are neither, whatever a row says.
_NO_IMAGES = (
    *("json", "jsonl", "csv", "tsv", "parquet", "arrow", "feather", "ipc", "txt", "md", "html", "xml", "yaml", "yml"),
    *("toml", "py", "sh", "log", "pdf", "xlsx", "tar", "zip", "gz", "tgz", "zst", "xz", "bz2", "7z", "rar"),
)

_BASE64 = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # the beginnings of PNG, JPEG, GIF and WebP in base64
_SHORTEST_BASE64 = 100  # a shorter text that begins so is a path, such as /9j/1.jpg
_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci")
_OBJECT = re.compile(r"(?P<protocol>[a-z0-9]+)://[A-Za-z0-9][A-Za-z0-9._@-]*/[^\0]+")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_NOT_THERE = (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError)
_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL)


class ImageRefOptions(StrictModel):
    """The directory that the image paths of a row are relative to."""

    image_root: str | dict[str, str] = Field(
        default="",
        description="directory below the source that image paths are relative to; empty: that of the row's file. Or a "
        "directory for the rows of each file: {train.json: train2017, val.json: val2017}",
    )


class ImageReader:
    """Reader of the images and videos that the rows of one part name. `image_root`: see ImageRefOptions."""

    def __init__(self, part: Part, image_root: str | Mapping[str, str] = "") -> None:
        self._source = part.path.parents[part.name.count("/")]
        if not isinstance(image_root, str):
            if part.name not in image_root:
                raise InputError(
                    f"options.image_root names no directory for the rows of {part.name}; add it, or name it in subsets"
                )
            image_root = image_root[part.name]
        self._base = self._source / image_root if image_root else part.path.parent
        self._stores = part.stores
        self._real = real_dirs(self._source) if is_local(self._source) else None

    def read(self, ref: str, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
        """Return the encoded bytes.

        Raises:
            SkipSample: image_not_found, decode_error for a broken data URI, bomb for a file over `max_bytes`.
            OSError: a disk does not answer, which is not the row's fault.
            InputError: a store does not answer.
        """
        if ref[:5].lower() == "data:":
            return _data_uri(ref)
        if len(ref) > _SHORTEST_BASE64 and ref.startswith(_BASE64):
            return _data_uri(f"data:;base64,{ref}")
        scheme = _SCHEME.match(ref)
        if not ref.strip() or "\0" in ref:
            raise _missing(ref, "no path")
        if not may_be_image(ref):
            raise _missing(ref, "its suffix is of no image or video")
        if scheme is None:
            return self.read_path(ref, max_bytes)
        if ref[:8].lower() == "file:///":  # as Qwen's tools write a path: as it is, without escapes
            return self.read_path(ref[7:], max_bytes)
        if len(scheme[1]) == 1:
            raise _missing(ref, "a path on a drive of Windows; name the image by its path below the data: images/1.jpg")
        if scheme[1].lower() in ("http", "https"):
            raise _missing(ref, "addresses of the web are not fetched; download the picture and name it by its path")
        if scheme[1] not in _STORES or "::" in ref or not _OBJECT.fullmatch(ref):
            raise _missing(ref, f"neither a path nor the address of an object ({'://, '.join(_STORES)}://)")
        return self._read_object(ref, ref, max_bytes)

    def read_path(self, ref: str, max_bytes: int = MAX_IMAGE_BYTES) -> bytes:
        """Return the file at a path, or if there is none and the path has backslashes, as on Windows, with slashes."""
        read = self._read_beside if self._real is None else self._read_local
        try:
            return read(ref, max_bytes)
        except SkipSample as skip:
            if "\\" not in ref or skip.reason != "image_not_found":
                raise
            return read(ref.replace("\\", "/"), max_bytes)

    def _read_local(self, ref: str, max_bytes: int) -> bytes:
        try:
            path = (self._base / ref).resolve(strict=True)
            if not any(path.is_relative_to(directory) for directory in self._real):
                raise _missing(ref, f"it leads to {str(path)!r}, outside of the source")
            if not path.is_file():
                raise _missing(ref, "it is no file")
            _check_size(path.stat().st_size, max_bytes)
            return path.read_bytes()
        except _NOT_THERE as error:
            way_out = "" if Path(ref).suffix else "; write the name with its suffix, such as .jpg"
            raise _missing(ref, f"{error.strerror or ''}{way_out}") from None
        except (ValueError, RuntimeError) as error:  # the file system allows no such name, or links form a ring
            raise _missing(ref, one_line(error, 100)) from None
        except OSError as error:
            if error.errno in _NO_PATH:
                raise _missing(ref, error.strerror or "") from None
            raise

    def _read_beside(self, ref: str, max_bytes: int) -> bytes:
        """Return the object at a path below a source in a store."""
        name = posixpath.normpath(posixpath.join(self._base.path, ref))
        if not name.startswith(self._source.path.rstrip("/") + "/"):
            raise _missing(ref, "it leads outside of the source")
        return self._read_object(f"{str(self._source).partition('://')[0]}://{name}", ref, max_bytes)

    def _read_object(self, address: str, ref: str, max_bytes: int) -> bytes:
        try:
            return read_object(address, self._stores, lambda size: _check_size(size, max_bytes))
        except NoObject as error:
            raise _missing(ref, str(error)) from error


def may_be_image(name: str) -> bool:
    """Whether a row may name a file of this name as an image or a video; its content must show whether it is one."""
    return name.rpartition(".")[2].lower() not in _NO_IMAGES


def check_image_root(source: StorePath, image_root: str | Mapping[str, str]) -> None:
    """Raise InputError unless each `image_root` is a directory below the source, or below the directory of its file."""
    top = source.parent if source.is_file() else source
    for root in (image_root,) if isinstance(image_root, str) else image_root.values():
        is_inside = not root.startswith("/") and ".." not in Path(root).parts
        if root and (not is_inside or not (top / root).is_dir()):
            raise InputError(f"options.image_root={root!r} is not a directory below {top}; give one, or leave it out")


def _data_uri(ref: str) -> bytes:
    """Return the content of a data URI (RFC 2397): data:[<media type>][;base64],<data>"""
    head, comma, body = ref.partition(",")
    if not comma:
        raise SkipSample("decode_error", "a data URI without a comma")
    try:
        if not head.lower().endswith(";base64"):
            return unquote_to_bytes(body)
        text = unquote_to_bytes(body) if "%" in body else body.encode("ascii")
        return base64.b64decode(b"".join(text.split()), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise SkipSample("decode_error", f"a data URI that is not base64: {str(error)[:100]}") from None


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise SkipSample("bomb", f"a file of {size} bytes; the limit is {max_bytes}")


def _missing(ref: str, why: str) -> SkipSample:
    return SkipSample("image_not_found", f"{ref[:120]!r}: {why}")
