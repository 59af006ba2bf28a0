"""Raw rows in the_cauldron's schema with intact, unusual and broken images, and parquet files of them."""

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from stages.embedded_data.digits import ROW_SCHEMA
from tests.helpers.drawn_pictures import encoded as encode

Row = dict[str, list[dict[str, object]]]


def picture(seed: int, width: int = 40, height: int = 32, mode: str = "RGB") -> Image.Image:
    """Return an image of noise in 8 x 8 blocks. Every seed gives another image."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    pixels = blocks.repeat(8, 0).repeat(8, 1)[:height, :width]
    return Image.fromarray(pixels).convert(mode)


def png(seed: int, width: int = 40, height: int = 32) -> bytes:
    return encode(picture(seed, width, height))


def png_header(width: int, height: int, color_type: int = 2, pixels: bytes = b"\0" * 64) -> bytes:
    """Return a PNG with a header and a given number of data bytes. By default it is the start of a decompression bomb
    without data."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    data = b"IDAT" + zlib.compress(pixels)
    pixels = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    end = struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + chunk + pixels + end


def jpeg_with_exif(image: Image.Image, exif: bytes) -> bytes:
    """Return a JPEG whose EXIF block is exactly these bytes."""
    data = encode(image, "JPEG", quality=95, subsampling=0)
    segment = b"Exif\0\0" + exif
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]


def orientation_exif(orientation: int) -> bytes:
    """Return a well-formed TIFF block with only the orientation tag."""
    return b"II*\0" + struct.pack("<IHHHIII", 8, 1, 0x0112, 3, 1, orientation, 0)


# Blocks that break parsers: garbage, a directory outside the block, a rational over zero, invalid text.
BROKEN_EXIF: dict[str, bytes] = {
    "garbage": b"\xde\xad\xbe\xef" * 5,
    "empty": b"",
    "directory outside": b"II*\0" + struct.pack("<I", 0xFFFFFF00),
    "cut directory": b"MM\0*" + struct.pack(">IH", 8, 40),
    "orientation is text": b"II*\0" + struct.pack("<IHHHI", 8, 1, 0x0112, 2, 4) + b"\xff\xfe\xfd\0" + b"\0" * 4,
    "orientation over zero": b"II*\0" + struct.pack("<IHHHIII", 8, 1, 0x0112, 5, 1, 26, 0) + struct.pack("<II", 1, 0),
    "orientation 77": orientation_exif(77),
}


def grey16_png(values: np.ndarray) -> bytes:
    """Return a 16-bit grey PNG of (h, w) uint16."""
    return encode(Image.fromarray(values.astype(np.uint16)))


# name -> (function that makes the bytes, skip reason with limits of 10^6 pixels and 8 pixels a side)
BAD_IMAGES: dict[str, tuple[Callable[[], bytes], str]] = {
    "no image": (lambda: b"<html>404 Not Found</html>" * 9, "decode_error"),
    "eps": (lambda: encode(picture(1), "EPS"), "decode_error"),
    "png with a broken block": (lambda: png(1).replace(b"IDAT", b"IDAX"), "decode_error"),
    "half a png": (lambda: png(1)[: len(png(1)) // 2], "truncated_image"),
    "half a jpeg": (lambda: encode(picture(1), "JPEG")[:400], "truncated_image"),
    "half a webp": (lambda: encode(picture(1), "WEBP")[:100], "truncated_image"),
    "half a gif": (lambda: encode(picture(1), "GIF")[:300], "truncated_image"),
    "half a tiff": (lambda: encode(picture(1), "TIFF")[:2000], "truncated_image"),
    "ten bytes of a png": (lambda: png(1)[:10], "truncated_image"),
    "png of a palette that is not there": (lambda: png_header(16, 16, 3, bytes(17 * 16)), "decode_error"),
    "bomb over our limit": (lambda: png_header(1001, 1000), "bomb"),
    "bomb over Pillow's limit": (lambda: png_header(60000, 60000), "bomb"),
    "1 x 1": (lambda: png(1, 1, 1), "too_small"),
    "7 pixels high": (lambda: png(1, 40, 7), "too_small"),
    "aspect 201": (lambda: png(1, 8 * 201, 8), "aspect"),
    "float": (lambda: encode(Image.new("F", (16, 16), 0.5), "TIFF"), "bad_mode"),
    "32 bit": (lambda: encode(Image.new("I", (16, 16), 70000), "TIFF"), "bad_mode"),
    "lab": (lambda: encode(Image.new("LAB", (16, 16)), "TIFF"), "bad_mode"),
}


def row(images: Sequence[bytes], pairs: Sequence[tuple[str | None, str | None]]) -> Row:
    return {
        "images": [{"bytes": image, "path": None} for image in images],
        "texts": [{"user": question, "assistant": answer, "source": "test"} for question, answer in pairs],
    }


def plain_rows(count: int, first_seed: int = 0) -> list[Row]:
    return [row([png(first_seed + i)], [(f"What is in picture {i}?", f"noise {i}")]) for i in range(count)]


def write_parquet(path: Path, rows: Sequence[Row], group_rows: int = 3, schema: pa.Schema = ROW_SCHEMA) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), path, row_group_size=group_rows)


def write_source(source: Path, subsets: dict[str, Sequence[Row]], file_rows: int = 10**6, group_rows: int = 3) -> Path:
    """Write a source directory of these subsets, in files of `file_rows` rows, and return it."""
    for subset, rows in subsets.items():
        for number, start in enumerate(range(0, max(1, len(rows)), file_rows)):
            write_parquet(source / subset / f"train-{number}.parquet", rows[start : start + file_rows], group_rows)
    return source


CORD_SCHEMA = pa.schema(
    [
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("ground_truth", pa.string()),
    ]
)


def cord_row(image: bytes | None, truth: object, path: str | None = None) -> dict[str, object]:
    """Return a row of cord-v2. A ground truth that is not a text is written as JSON."""
    text = truth if isinstance(truth, str | None) else json.dumps(truth)
    return {"image": {"bytes": image, "path": path}, "ground_truth": text}


def mixed_rows() -> list[Row]:
    """Return rows of every kind that convert keeps: shared images, several images or none, several pairs, unusual
    modes."""
    shared = [png(1000 + i) for i in range(4)]
    rows = plain_rows(24)
    rows += [
        row([shared[i], shared[i + 1]], [("Which is darker?", "first"), ("And why?", "less light")]) for i in (0, 2)
    ]
    rows += [row([shared[i]], [(f"Describe number {i}.", "blocks")]) for i in range(4)]
    rows += [row([], [(f"What is {i} plus 1?", str(i + 1))]) for i in range(12)]
    rows += [row([encode(picture(50, mode="CMYK"), "JPEG")], [("Print?", "yes")])]
    rows += [row([encode(picture(51, mode="P"))], [("Palette?", "yes")])]
    rows += [row([jpeg_with_exif(picture(52), orientation_exif(6))], [("Upright?", "now")])]
    return rows
