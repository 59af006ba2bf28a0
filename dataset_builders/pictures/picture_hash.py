"""Image similarity in a few bytes: a 64-bit perceptual hash, and the grey thumbnail that it is computed from.

The hash is pHash's, as the ImageHash library defines it (github.com/JohannesBuchner/imagehash, `phash`; Zauner,
"Implementation and Benchmarking of Perceptual Image Hash Functions", 2010): the 8 x 8 lowest frequencies of the DCT of
a 32 x 32 grey thumbnail, one bit each: above their median or not.

A hash of 64 bits cannot distinguish scans of one digit, or two forms (docs/decisions/data.md says why). Images
with similar hashes are therefore compared by their thumbnails, and then at their own size.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from dataset_builders.pictures.images import read_rgb, shrink_grey

THUMBNAIL_SIDE = 32  # pixels
_FREQUENCIES = 8  # per axis
_SCALE = 1 << 14  # scale of the integer cosines; 32 * 32 * 255 * 2^28 stays below 2^63
# (8, 32): the first rows of the DCT-II, not normalised. Integers, because the frequencies of an image of one colour
# would otherwise be rounding errors, which differ by machine.
_FREQUENCY, _PLACE = np.mgrid[0:_FREQUENCIES, 0:THUMBNAIL_SIDE]
_COSINES = np.round(_SCALE * np.cos(np.pi * _FREQUENCY * (2 * _PLACE + 1) / (2 * THUMBNAIL_SIDE))).astype(np.int64)


@dataclass(frozen=True, slots=True)
class PictureLook:
    """The perceptual record of a decoded image."""

    # SHA-256 of height, width and the RGB pixels, 32 bytes: equal for equal pixels in any file format.
    pixels_sha256: bytes
    width: int  # in pixels, upright
    height: int
    phash: int  # the 64-bit hash
    thumbnail: bytes  # 1,024 bytes, (32, 32) uint8 grey


def look_at(data: bytes) -> PictureLook:
    """Decode an image, upright and with transparency on white, and return its perceptual record. Raises SkipSample."""
    rgb = np.ascontiguousarray(read_rgb(data))
    height, width, _ = rgb.shape
    digest = hashlib.sha256(b"%d %d " % (height, width))
    digest.update(rgb)
    thumbnail = shrink_grey(rgb, THUMBNAIL_SIDE)
    return PictureLook(digest.digest(), width, height, phash(thumbnail), thumbnail.tobytes())


def phash(thumbnail: np.ndarray) -> int:
    """Return the 64-bit hash of a (32, 32) uint8 grey thumbnail, with the lowest frequency in the highest bit."""
    low = _COSINES @ thumbnail.astype(np.int64) @ _COSINES.T
    ordered = np.sort(low, axis=None)
    middle = len(ordered) // 2
    bits = (
        2 * low > ordered[middle - 1] + ordered[middle]
    )  # the median of an even number may be no integer; twice it is
    return int.from_bytes(np.packbits(bits).tobytes(), "big")
