"""120 images of mixed modes and sizes that are the same on every machine, and the reference's pixels for them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from dataset_builders.contracts.tokenized import PatchFormat
from dataset_builders.pictures.pixels import PixelConfig
from tests.helpers.drawn_pictures import encoded

MODES = ("RGB", "L", "RGBA", "LA", "P", "1", "CMYK", "I;16")
FORMATS = {"CMYK": "TIFF", "I;16": "PNG"}
_SIZES = ((1, 1), (1, 60), (31, 33), (32, 32), (64, 96), (100, 100), (200, 3), (17, 400), (301, 299), (640, 479))
NUM_IMAGES = 120

HALF = (0.5, 0.5, 0.5)
# Means whose float32 products are not exact, so that another order or precision of the arithmetic shows.
UNEVEN_MEAN, UNEVEN_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class PixelCase:
    """An image and the settings by which it is scaled."""

    name: str
    data: bytes
    config: PixelConfig


def image_config(uneven: bool = False, patch_size: int = 16) -> PixelConfig:
    """Return limits that are so small that some images are scaled up and some are scaled down."""
    patch_format = PatchFormat(
        patch_size=patch_size,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=UNEVEN_MEAN if uneven else HALF,
        image_std=UNEVEN_STD if uneven else HALF,
    )
    return PixelConfig(min_pixels=64 * 64, max_pixels=320 * 320, patch_format=patch_format)


def pixel_cases() -> Iterator[PixelCase]:
    """Return the images, with even and uneven means in rotation. Every seventh image has patches of 14 pixels."""
    for i in range(NUM_IMAGES):
        mode = MODES[i % len(MODES)]
        width, height = _SIZES[i % len(_SIZES)]
        stretch = 1 + i // len(_SIZES) if min(width, height) > 3 else 1
        width, height = width + 5 * stretch, height + 3 * stretch
        config = image_config(uneven=i % 2 == 1, patch_size=14 if i % 7 == 6 else 16)
        yield PixelCase(f"{i:03d} {mode} {width}x{height}", _encode(_picture(width, height, i), mode), config)


def reference_digest(pixel_values: np.ndarray, grid: np.ndarray) -> str:
    """Return 64 hex digits: the digest of the grid and the float32 values."""
    assert pixel_values.dtype == np.float32
    h = hashlib.sha256(np.asarray(grid, "<i4").tobytes())
    h.update(np.ascontiguousarray(pixel_values, "<f4").tobytes())
    return h.hexdigest()


def _picture(width: int, height: int, seed: int) -> np.ndarray:
    """Return (height, width, 4) uint8 with slopes, hard edges and noise, made with integers only. The random stream of
    RandomState never changes."""
    random = np.random.RandomState(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    slopes = np.stack([rows * 3 + columns, rows + columns * 5, rows * columns // 7, 255 - rows - columns // 2], -1)
    squares = ((rows // 9 + columns // 11) % 2 * 200)[..., None]
    noise = random.randint(0, 40, (height, width, 4))
    kind = seed % 3
    return ((slopes + noise, squares + noise, random.randint(0, 256, (height, width, 4)))[kind] % 256).astype(np.uint8)


def _encode(picture: np.ndarray, mode: str) -> bytes:
    """Encode losslessly, without those conversions of Pillow that could differ between versions."""
    grey = picture[..., 0]
    if mode == "I;16":
        image = Image.fromarray(grey.astype(np.uint16) * 256 + picture[..., 1])
    elif mode == "P":
        image = Image.fromarray(grey)
        image.putpalette([(7 * i + 11 * (i % 3)) % 256 for i in range(768)])
    elif mode == "1":
        image = Image.fromarray(grey > 127)
    else:
        bands = {"RGB": 3, "RGBA": 4, "CMYK": 4, "L": 1, "LA": 2}[mode]
        image = Image.merge(mode, [Image.fromarray(np.ascontiguousarray(picture[..., b])) for b in range(bands)])
    return encoded(image, FORMATS.get(mode, "PNG"))
