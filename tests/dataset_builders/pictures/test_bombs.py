"""Small files that claim much work: none takes as long as the fuzz test allows, or hundreds of megabytes."""

import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.pictures.images import ImageLimits, check_image, read_rgb
from tests.fuzz.watch import SECONDS
from tests.helpers.raw_rows import encode, picture
from tests.helpers.tiers import tiered

pytestmark = pytest.mark.promise(
    "Images that cost seconds per kilobyte, damaged JPEGs, endless chat templates and links out of a source "
    "are refused with a reason."
)

LIMITS = ImageLimits(max_pixels=89_478_485, min_side=8)
GROWTH_MB = 150


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _png(before: bytes = b"", pixels: bytes | None = None, after: bytes = b"") -> bytes:
    """Return a 16 x 16 PNG with chunks before and after its pixels, which are given compressed."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0))
    raw = zlib.compress((b"\0" + b"\x55" * 48) * 16)
    data = _chunk(b"IDAT", raw if pixels is None else pixels)
    return b"\x89PNG\r\n\x1a\n" + header + before + data + after + _chunk(b"IEND", b"")


def _many_idat() -> bytes:
    raw = zlib.compress((b"\0" + b"\x55" * 48) * 16)
    pieces = b"".join(_chunk(b"IDAT", raw[i : i + 1]) for i in range(len(raw) - 1))
    return _png().replace(_chunk(b"IDAT", raw), pieces + _chunk(b"IDAT", b"") * 50_000 + _chunk(b"IDAT", raw[-1:]))


def _jpeg_with(segments: bytes) -> bytes:
    data = encode(picture(1), "JPEG")
    return data[:2] + segments + data[2:]


def _gif_with(blocks: bytes, frames: int = 1) -> bytes:
    data = encode(picture(1, 16, 16, "P"), "GIF")
    start = data.index(b",\0\0\0\0")
    return data[:start] + blocks + data[start:-1] * frames + b";"


def _frames(image_format: str, count: int, *size: int) -> bytes:
    more = [picture(i, *size) for i in range(count)]
    return encode(picture(1, *size), image_format, save_all=True, append_images=more)


def _tiff(tags: list[tuple[int, int, int, int]], next_directory: int = 0, tail: bytes = b"") -> bytes:
    """Return a grey 16 x 16 TIFF with more tags, (tag, type, count, value); pixels and tail follow the directory."""
    place = 8 + 2 + 12 * (9 + len(tags)) + 4
    own = [(256, 3, 1, 16), (257, 3, 1, 16), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, place)]
    own += [(277, 3, 1, 1), (278, 3, 1, 16), (279, 4, 1, 256)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in [*own, *tags])
    directory = struct.pack("<H", len(own) + len(tags)) + entries + struct.pack("<I", next_directory)
    return b"II*\0" + struct.pack("<I", 8) + directory + b"\x40" * 256 + tail


BOMBS: dict[str, Callable[[], bytes]] = {
    "png: pixels in 50,000 chunks": _many_idat,
    "png: 50,000 chunks of nothing": lambda: _png(_chunk(b"prVt", b"") * 50_000),
    "png: a gigabyte of text": lambda: _png(_chunk(b"zTXt", b"a\0\0" + zlib.compress(b"a" * 10**9, 1))),
    "png: 200 megabytes of texts": lambda: _png(_chunk(b"zTXt", b"a\0\0" + zlib.compress(b"a" * 10**6)) * 200),
    "png: 200 megabytes of texts behind the pixels": lambda: _png(
        after=_chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(b"a" * 10**6)) * 200
    ),
    "png: a gigabyte of colour profile": lambda: _png(_chunk(b"iCCP", b"a\0\0" + zlib.compress(b"a" * 10**9, 1))),
    "png: a gigabyte of pixels for 256": lambda: _png(pixels=zlib.compress(b"\0" * 10**9, 1)),
    "png: says two billion frames": lambda: _png(_chunk(b"acTL", struct.pack(">II", 0x7FFFFFFF, 0))),
    "apng: 1,000 frames": lambda: _frames("PNG", 1000, 16, 16),
    "webp: 300 frames": lambda: _frames("WEBP", 300),
    "gif: 50,000 frames": lambda: _gif_with(b"", 50_000),
    "gif: 50,000 comments": lambda: _gif_with(b"\x21\xfe\x01a\0" * 50_000),
    "jpeg: 50,000 comments": lambda: _jpeg_with(b"\xff\xfe\0\2" * 50_000),
    "jpeg: a megabyte of fill bytes": lambda: _jpeg_with(b"\xff" * 1_000_000),
    "jpeg: 50,000 pieces of a colour profile": lambda: _jpeg_with((b"\xff\xe2\0\x10" + b"ICC_PROFILE\0\1\1") * 50_000),
    "tiff: its directory is the next one": lambda: _tiff([], next_directory=8),
    "tiff: 5,000 tags of the same 100 kB": lambda: _tiff(
        [(40_000 + i, 2, 100_000, 8) for i in range(5000)], tail=b"a" * 40_000
    ),
    "ppm: a megabyte of comment": lambda: b"P6\n#" + b"a" * 1_000_000 + b"\n16 16\n255\n" + b"a" * 768,
}
REFUSED = {  # as decode_error; all others are read
    *("png: a gigabyte of text", "png: 200 megabytes of texts", "png: 200 megabytes of texts behind the pixels"),
    "png: a gigabyte of colour profile",
}


def _memory(name: str) -> int:
    """Return the megabytes of this process: VmRSS is the present, VmHWM the peak."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) // 1024


def _verdict(data: bytes) -> str:
    try:
        check_image(data, LIMITS)
        read_rgb(data, whole=True)
    except SkipSample as skip:
        return skip.reason
    return "read"


_CORE = (  # one of each format; texts, profiles and pixels of png
    *("png: a gigabyte of text", "png: a gigabyte of pixels for 256", "webp: 300 frames", "gif: 50,000 frames"),
    *("jpeg: 50,000 comments", "tiff: its directory is the next one", "ppm: a megabyte of comment"),
)


@pytest.mark.parametrize("name", tiered(BOMBS, _CORE))
def test_a_small_file_costs_little(name):
    data = BOMBS[name]()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = _memory("VmRSS"), time.process_time()
    assert _verdict(data) == ("decode_error" if name in REFUSED else "read")
    assert time.process_time() - start < SECONDS
    assert _memory("VmHWM") - before < GROWTH_MB
