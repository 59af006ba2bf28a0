"""JPEG files: a bound on their scans, the damage that Pillow keeps silent about, and a decoder faster than Pillow's.

Most files are decoded by simplejpeg, which gives Pillow's bits: both are libjpeg-turbo with its exact integer
transform. A file that simplejpeg warns about goes to Pillow, which reads it without a word; `refuse_damage` judges the
warning.
"""

import re
from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from dataset_builders.contracts.sample import SkipSample

FORMATS = ("JPEG", "MPO")  # Pillow's names; MPO: a JPEG with others behind it, as phones write them
# Every scan of a progressive file passes over all pixels (0.6 ns each), however few bytes it has. Encoders write about
# 10. 100 is also libtiff's limit for JPEG inside TIFF; together the two bound the seconds of a picture of any size.
MAX_SCANS = 100
MAX_SCAN_PIXELS = 1 << 31  # scans * width * height: 24 scans of Pillow's largest picture

# What simplejpeg decodes to Pillow's bits (tests/dataset_builders/pictures/test_pixels.py): baseline and progressive
# frames of grey, or of three components with these sampling factors. Four components (CMYK, YCCK) are not among them.
_FRAMES = (0xC0, 0xC1, 0xC2)
_SEQUENTIAL = (0xC0, 0xC1)
_SAMPLINGS = {((1, 1),), *(((h, v), (1, 1), (1, 1)) for h, v in ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1)))}
_START_OF_SCAN = b"\xff\xda"
# A marker as libjpeg-turbo finds the next one: not a stuffed zero, a fill byte, a restart or a code without a meaning.
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
_WITHOUT_LENGTH, _END_OF_IMAGE = 0xD8, 0xD9
# libjpeg-turbo's warnings of missing or undecodable picture data -> the reason. Its other warnings (bytes too many
# before a marker, an unknown JFIF version, scan parameters) come with pictures that are whole, and are no reason.
_DAMAGE = {
    "premature end": "truncated_image",  # of the data of a scan, or of a file without its end mark
    "bad Huffman code": "decode_error",
    "bad arithmetic code": "decode_error",
    "instead of RST": "decode_error",  # a restart interval is missing
}


class _Head(NamedTuple):
    """Of a JPEG file up to its first scan.

    Attributes:
        frame: the frame header's marker, 0xC0 to 0xCF (ITU T.81, table B.1); 0 if there is none.
        num_components: of the frame.
        num_in_scan: components in the first scan.
    """

    frame: int
    num_components: int
    num_in_scan: int


def check_scans(data: bytes, width: int, height: int) -> None:
    """Raise SkipSample (bomb) for a JPEG of more scans than a picture of this size may have. Nothing is decoded."""
    head = _read_head(data)
    if head.frame in _SEQUENTIAL and head.num_in_scan == head.num_components:
        return  # one scan, in which all components are interleaved: libjpeg-turbo refuses a second one
    limit = min(MAX_SCANS, MAX_SCAN_PIXELS // (width * height))
    if data.count(_START_OF_SCAN) > limit and _count_scans(data) > limit:
        raise SkipSample("bomb", f"a JPEG of {_count_scans(data)} scans, the limit is {limit} at {width} x {height}")


def decode_jpeg(image: Image.Image, data: bytes) -> np.ndarray | None:
    """The pixels as they are stored, by simplejpeg, if they are sure to be those that Pillow gives.

    Args:
        image: `data`, opened by Pillow and not yet decoded.

    Returns:
        (height, width, 3) uint8, not turned; None: the file is broken, or one that Pillow must decode.
    """
    if not is_plain_jpeg(image, data):
        return None
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB")
    except MemoryError:
        raise
    except Exception:  # also for a warning of the decoder: Pillow decides about such a file
        return None
    return pixels if pixels.shape == (image.height, image.width, 3) else None


def jpeg_warning(image: Image.Image, data: bytes) -> str:
    """libjpeg-turbo's first warning or error about the file, or "".

    Every coded bit is read. Only the arithmetic that turns coefficients into pixels, which cannot fail, is done for one
    pixel in 64 (1 in 8 per side is the coarsest scale of libjpeg-turbo).
    """
    try:
        simplejpeg.decode_jpeg(data, "CMYK" if image.mode == "CMYK" else "GRAY", min_height=1, min_width=1)
    except MemoryError:
        raise
    except Exception as error:
        return str(error) or "unknown"
    return ""


def refuse_damage(warning: str) -> None:
    """Raise SkipSample if a `jpeg_warning` says that picture data are missing or cannot be decoded."""
    for text, reason in _DAMAGE.items():
        if text.lower() in warning.lower():
            raise SkipSample(reason, warning)


def is_plain_jpeg(image: Image.Image, data: bytes) -> bool:
    """Whether simplejpeg gives Pillow's bits for this file, if it is whole."""
    if image.format not in FORMATS or image.mode not in ("L", "RGB"):
        return False
    sampling = tuple((h, v) for _, h, v, _ in image.layer)
    return sampling in _SAMPLINGS and _read_head(data).frame in _FRAMES


def _read_head(data: bytes) -> _Head:
    frame = num_components = 0
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == _START_OF_SCAN[1]:
            return _Head(frame, num_components, data[place + 4] if place + 4 < len(data) else 0)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame, num_components = marker, data[place + 9] if place + 9 < len(data) else 0
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return _Head(0, 0, 0)


def _count_scans(data: bytes) -> int:
    """Scans up to the end of the image; those of a thumbnail, or of another picture behind it, do not count."""
    scans, place = 0, 2
    while match := _MARKER.search(data, place):
        place, marker = match.end(), data[match.end() - 1]
        if marker == _END_OF_IMAGE:
            break
        if marker != _WITHOUT_LENGTH:
            scans += marker == _START_OF_SCAN[1]
            place += int.from_bytes(data[place : place + 2], "big")
    return scans
