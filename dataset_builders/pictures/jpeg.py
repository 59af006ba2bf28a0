"""JPEG files: a bound on their scans, a check for damage that Pillow does not report, and a decoder faster than
Pillow's.

Most files are decoded by simplejpeg, which gives the same bits as Pillow: both use libjpeg-turbo with its exact integer
transform.
"""

import re
from typing import NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from dataset_builders.contracts.sample import SkipSample

FORMATS = ("JPEG", "MPO")  # Pillow's names; MPO: a JPEG with further images after it, as phones write them
# Every scan of a progressive file passes over all pixels (0.6 ns per pixel), however few bytes the scan has. Encoders
# write about 10 scans. 100 is also libtiff's limit for JPEG inside TIFF; together the two limits bound the decoding
# time of an image of any size.
MAX_SCANS = 100
MAX_SCAN_PIXELS = 1 << 31  # scans * width * height: 24 scans of Pillow's largest image

# Files that simplejpeg decodes to Pillow's bits (tests/dataset_builders/pictures/test_pixels.py): baseline and
# progressive frames of grey, or of three components with these sampling factors. Not: four components (CMYK, YCCK).
_FRAMES = (0xC0, 0xC1, 0xC2)
_SEQUENTIAL = (0xC0, 0xC1)
_SAMPLINGS = {((1, 1),), *(((h, v), (1, 1), (1, 1)) for h, v in ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1)))}
_START_OF_SCAN = b"\xff\xda"
# The next marker as libjpeg-turbo finds it: not a stuffed zero, a fill byte, a restart, or a code without a meaning.
_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
_WITHOUT_LENGTH, _END_OF_IMAGE = 0xD8, 0xD9
# libjpeg-turbo's warnings of missing or undecodable pixel data -> the skip reason. Its other warnings (excess bytes
# before a marker, an unknown JFIF version, scan parameters) occur in files with complete images and are ignored.
_DAMAGE = {
    "premature end": "truncated_image",  # in a scan's data, or the file has no end mark
    "bad Huffman code": "decode_error",
    "bad arithmetic code": "decode_error",
    "instead of RST": "decode_error",  # a restart interval is missing
}


class _Head(NamedTuple):
    """Facts from a JPEG file's headers up to its first scan."""

    frame: int  # the frame header's marker, 0xC0 to 0xCF (ITU T.81, table B.1); 0 if there is none
    num_components: int  # of the frame
    num_in_scan: int  # components in the first scan


def check_scans(data: bytes, width: int, height: int) -> None:
    """Raise SkipSample (bomb) for a JPEG with more scans than an image of this size may have. Nothing is decoded."""
    head = _read_head(data)
    if head.frame in _SEQUENTIAL and head.num_in_scan == head.num_components:
        return  # one scan with all components interleaved: libjpeg-turbo refuses a second scan
    limit = min(MAX_SCANS, MAX_SCAN_PIXELS // (width * height))
    if data.count(_START_OF_SCAN) > limit and _count_scans(data) > limit:
        raise SkipSample("bomb", f"a JPEG of {_count_scans(data)} scans, the limit is {limit} at {width} x {height}")


def decode_jpeg(image: Image.Image, data: bytes) -> np.ndarray | None:
    """Decode the stored pixels to (height, width, 3) uint8, not rotated; None if Pillow must read the file.

    Args:
        image: `data`, opened by Pillow and not yet decoded.
    """
    if not is_plain_jpeg(image, data):
        return None
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB")
    except MemoryError:
        raise
    except Exception:  # includes warnings of the decoder: Pillow decides about such a file
        return None
    return pixels if pixels.shape == (image.height, image.width, 3) else None


def jpeg_warning(image: Image.Image, data: bytes) -> str:
    """Return libjpeg-turbo's first warning or error about the file, or ""."""
    # The smallest size is 1/8 of each side. Every coded bit is read for it; only the conversion of coefficients to
    # pixels, which cannot fail, is reduced.
    try:
        simplejpeg.decode_jpeg(data, "CMYK" if image.mode == "CMYK" else "GRAY", min_height=1, min_width=1)
    except MemoryError:
        raise
    except Exception as error:
        return str(error) or "unknown"
    return ""


def refuse_damage(warning: str) -> None:
    """Raise SkipSample if a `jpeg_warning` means that pixel data are missing or cannot be decoded."""
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
        # C4, C8 and CC are Huffman tables, a reserved code and arithmetic conditioning, and no frames.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame, num_components = marker, data[place + 9] if place + 9 < len(data) else 0
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return _Head(0, 0, 0)


def _count_scans(data: bytes) -> int:
    """Count the scans up to the end of the image, without scans of a thumbnail or of a further image after it."""
    scans, place = 0, 2
    while match := _MARKER.search(data, place):
        place, marker = match.end(), data[match.end() - 1]
        if marker == _END_OF_IMAGE:
            break
        if marker != _WITHOUT_LENGTH:
            scans += marker == _START_OF_SCAN[1]
            place += int.from_bytes(data[place : place + 2], "big")
    return scans
