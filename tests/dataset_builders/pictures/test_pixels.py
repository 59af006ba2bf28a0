"""The fast decoder against Pillow: bit-equal for every file that it reads, and every file is judged as Pillow does."""

import io
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageFile

from dataset_builders.pictures.images import decode_jpeg, open_rgb, read_rgb
from dataset_builders.pictures.pixels import count_patches, encode_image, image_grid, pixel_values
from tests.helpers.pixels import image_config, pixel_cases

_SIZES = ((1, 1), (2, 3), (8, 8), (7, 9), (16, 17), (33, 31), (101, 67), (200, 3), (64, 48))
_QUALITIES = (1, 50, 92, 100)
_KINDS: dict[str, dict[str, object]] = {
    "444": {"subsampling": "4:4:4"},
    "422": {"subsampling": "4:2:2"},
    "420": {"subsampling": "4:2:0"},
    "420 optimized": {"subsampling": "4:2:0", "optimize": True},
    "444 progressive": {"subsampling": "4:4:4", "progressive": True},
    "420 progressive": {"subsampling": "4:2:0", "progressive": True},
    "420 restart": {"subsampling": "4:2:0", "restart_marker_blocks": 2},
    "422 restart rows": {"subsampling": "4:2:2", "restart_marker_rows": 1},
    "progressive restart": {"progressive": True, "restart_marker_blocks": 3},
    "RGB": {"keep_rgb": True},
    "grey": {"mode": "L"},
    "grey progressive": {"mode": "L", "progressive": True},
}
_SLOW_KINDS: dict[str, dict[str, object]] = {"CMYK": {"mode": "CMYK"}, "CMYK progressive": {"mode": "CMYK"}}


def _picture(width: int, height: int, seed: int) -> np.ndarray:
    """Return (height, width, 3) uint8: slopes, hard edges or noise."""
    random = np.random.RandomState(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    if seed % 3 == 0:
        picture = np.stack([rows * 3 + columns, rows + columns * 5, 255 - rows], -1) + random.randint(0, 40, (3,))
    elif seed % 3 == 1:
        picture = np.where(((rows // 5 + columns // 7) % 2)[..., None], random.randint(0, 256, 3), 255)
    else:
        picture = random.randint(0, 256, (height, width, 3))
    return (picture % 256).astype(np.uint8)


def _jpeg(picture: np.ndarray, quality: int, mode: str = "RGB", **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture).convert(mode).save(out, "JPEG", quality=quality, **options)
    return out.getvalue()


def _jpegs() -> Iterator[tuple[str, bytes]]:
    """Yield hundreds of whole files as (kind, bytes)."""
    for number, (width, height) in enumerate(_SIZES):
        for quality, (kind, options) in itertools.product(_QUALITIES, _KINDS.items()):
            yield kind, _jpeg(_picture(width, height, number), quality, **options)
        for sampling in ("440", "411"):
            picture = _picture(width, height, number)
            yield sampling, simplejpeg.encode_jpeg(picture, 85, colorsubsampling=sampling)


@pytest.fixture(autouse=True)
def _room_for_tiny_noise(monkeypatch):
    monkeypatch.setattr(ImageFile, "MAXBLOCK", 1 << 20)  # Pillow's buffer for an optimized file is too small for noise


def _fast(data: bytes) -> np.ndarray | None:
    return decode_jpeg(Image.open(io.BytesIO(data)), data)


def test_the_fast_decoder_gives_pillows_bits_on_every_kind_it_takes():
    taken: dict[str, int] = {}
    for kind, data in _jpegs():
        fast = _fast(data)
        assert fast is not None, kind
        assert np.array_equal(fast, np.asarray(open_rgb(data))), kind
        taken[kind] = taken.get(kind, 0) + 1
    assert len(taken) == len(_KINDS) + 2 and sum(taken.values()) > 400


@pytest.mark.parametrize("kind", _SLOW_KINDS)
def test_what_it_decodes_to_other_bits_goes_to_pillow(kind):
    data = _jpeg(_picture(33, 47, 0), 90, progressive="progressive" in kind, **_SLOW_KINDS[kind])
    assert _fast(data) is None
    assert np.array_equal(read_rgb(data), np.asarray(open_rgb(data)))
    assert not np.array_equal(simplejpeg.decode_jpeg(data, "RGB"), read_rgb(data)), "Pillow is here for a reason"


@pytest.mark.parametrize(
    ("place", "value"),
    [(11, 0x24), (11, 0x31), (1, 0xC3), (1, 0xC9), (1, 0xCA)],
    ids=["sampling 2x4", "sampling 3x1", "lossless", "arithmetic", "arithmetic progressive"],
)
def test_a_frame_that_was_not_tried_goes_to_pillow(place, value, monkeypatch):
    monkeypatch.setattr("simplejpeg.decode_jpeg", lambda *given, **options: pytest.fail("decoded"))
    data = bytearray(_jpeg(_picture(64, 64, 0), 90, subsampling="4:2:0"))
    data[data.index(b"\xff\xc0") + place] = value
    assert _fast(bytes(data)) is None


def test_other_formats_are_read_as_before():
    for case in pixel_cases():
        assert np.array_equal(read_rgb(case.data), np.asarray(open_rgb(case.data))), case.name


def test_headers_alone_tell_the_number_of_patches():
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(_picture(150, 70, 0)).save(turned, "JPEG", exif=exif)
    for data in [turned.getvalue(), *(case.data for case in pixel_cases())]:
        patches, grid = encode_image(data, image_config())
        assert count_patches(data, image_config()) == len(patches) == grid.prod()
    assert image_grid(150, 70, image_config()).tolist() == [1, 10, 4]


def test_pixel_values_fill_the_given_array_and_none_beyond():
    config = image_config(uneven=True)
    patches = np.random.default_rng(0).integers(0, 256, (2500, 768)).astype(np.uint8)
    out = np.full((2600, 1536), 7, np.float32)
    values = pixel_values(patches, config.patch_format, out)
    assert np.shares_memory(values, out) and (out[2500:] == 7).all()
    assert np.array_equal(values, pixel_values(patches, config.patch_format))
