"""Which images are refused and why; every accepted pixel format becomes the RGB that a person would see."""

import io
import struct
import subprocess
import sys
import zlib
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.pictures import images
from dataset_builders.pictures.images import (
    ImageLimits,
    check_image,
    enlarge_grey,
    open_rgb,
    pixels_png,
    preview_png,
    read_rgb,
)
from tests.helpers.raw_rows import (
    BAD_IMAGES,
    BROKEN_EXIF,
    encode,
    grey16_png,
    jpeg_with_exif,
    orientation_exif,
    picture,
    png,
    png_header,
)

LIMITS = ImageLimits(max_pixels=10**6, min_side=8)


def pixels(data: bytes) -> np.ndarray:
    image = open_rgb(data)
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_bad_image_is_refused_with_its_reason(name):
    make, reason = BAD_IMAGES[name]
    with pytest.raises(SkipSample) as caught:
        check_image(make(), LIMITS)
    assert caught.value.reason == reason, caught.value.detail


@pytest.mark.parametrize("error", [AssertionError(), IndexError("7"), RuntimeError("odd"), RecursionError()], ids=type)
@pytest.mark.parametrize("place", ["PIL.Image.open", "PIL.ImageFile.ImageFile.load", "PIL.Image.Image.convert"])
def test_whatever_a_decoder_raises_is_a_reason(place, error, monkeypatch):
    data = encode(picture(1, mode="P"))
    monkeypatch.setattr(place, Mock(side_effect=error))
    with pytest.raises(SkipSample, match=f"decode_error: {len(data)} bytes: {error or type(error).__name__}"):
        open_rgb(data)


def test_a_jpeg_decoder_may_fail_as_it_likes(monkeypatch):
    data = encode(picture(1), "JPEG")
    expected = read_rgb(data)
    monkeypatch.setattr("simplejpeg.decode_jpeg", Mock(side_effect=AssertionError("odd")))
    np.testing.assert_array_equal(read_rgb(data), expected)
    assert check_image(data, LIMITS).format == "JPEG"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (encode(picture(1), "EPS"), "no image format that is read here"),  # Pillow would pass it to Ghostscript
        (png_header(60000, 60000), "bomb: "),
    ],
    ids=["postscript", "bomb over Pillow's limit"],
)
def test_reading_itself_refuses(data, words):
    with pytest.raises(SkipSample, match=words):
        open_rgb(data)


def test_bomb_is_refused_before_a_pixel_is_decoded(monkeypatch):
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", lambda self: pytest.fail("decoded"))
    with pytest.raises(SkipSample, match="1001 x 1000"):
        check_image(png_header(1001, 1000), LIMITS)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "PPM"])
def test_no_cut_is_accepted_as_another_picture(image_format):
    """An image cut at any byte is refused as truncated, or (if only its end marker is missing) shows every pixel."""
    data = encode(picture(3), image_format)
    whole = pixels(data)
    assert check_image(data, LIMITS).format == image_format
    reasons = set()
    for length in range(16, len(data), max(1, len(data) // 60)):
        try:
            check_image(data[:length], LIMITS)
            np.testing.assert_array_equal(pixels(data[:length]), whole)
        except SkipSample as skip:
            reasons.add(skip.reason)
    assert "truncated_image" in reasons and reasons <= {"truncated_image", "decode_error"}


def test_random_damage_is_refused_or_read_but_never_raises_anything_else():
    rng = np.random.default_rng(0)
    for image_format in ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"]:
        data = encode(picture(4), image_format)
        for _ in range(60):
            damaged = bytearray(data)
            for place in rng.integers(0, len(data), 4):
                damaged[place] = rng.integers(256)
            try:
                check_image(bytes(damaged), LIMITS)
            except SkipSample as skip:
                assert skip.reason in {"decode_error", "truncated_image", "bomb", "too_small", "aspect", "bad_mode"}


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP"])
def test_the_header_check_says_the_same_of_sound_files(image_format, monkeypatch):
    exif = {"exif": orientation_exif(6)} if image_format in ("JPEG", "WEBP") else {}
    data = encode(picture(5, 48, 32), image_format, **exif)
    whole = check_image(data, LIMITS)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    assert check_image(data, LIMITS, decode=False) == whole


def test_the_header_check_keeps_the_limits_and_lets_damage_pass():
    for name, (make, reason) in BAD_IMAGES.items():
        try:
            check_image(make(), LIMITS, decode=False)
            assert reason in ("truncated_image", "decode_error") or name == "32 bit", name
        except SkipSample as skip:
            assert skip.reason == reason, name


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_orientation_is_applied(orientation, image_format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if image_format == "JPEG" else {"lossless": True} if image_format == "WEBP" else {}
    data = encode(picture(5, 48, 32), image_format, exif=exif, **options)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    np.testing.assert_array_equal(pixels(data), expected)
    np.testing.assert_array_equal(read_rgb(data), expected)
    for info in (check_image(data, LIMITS), check_image(data, LIMITS, decode=False)):
        assert (info.width, info.height) == ((32, 48) if orientation > 4 else (48, 32))


@pytest.mark.parametrize("name", BROKEN_EXIF)
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_keeps_the_picture_as_it_is_stored(name, image_format):
    exif, options = BROKEN_EXIF[name], {"lossless": True} if image_format == "WEBP" else {}
    if image_format == "JPEG":
        data, plain = jpeg_with_exif(picture(6), exif), encode(picture(6), "JPEG", quality=95, subsampling=0)
    else:
        data, plain = encode(picture(6), image_format, exif=exif, **options), png(6)
    info = check_image(data, LIMITS)
    assert (info.width, info.height, info.orientation) == (40, 32, 1)
    np.testing.assert_array_equal(pixels(data), pixels(plain))


def test_broken_exif_in_a_text_chunk_keeps_the_picture():
    text = PngInfo()
    text.add_text("Raw profile type exif", "\nexif\n  4\nno hex")
    data = encode(picture(6), pnginfo=text)
    assert check_image(data, LIMITS).orientation == 1
    np.testing.assert_array_equal(pixels(data), pixels(png(6)))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_composited_on_white(mode):
    image = picture(7, mode=mode)
    alpha = np.zeros((32, 40), np.uint8)
    alpha[:, 20:] = 255
    alpha[:4] = 128
    image.putalpha(Image.fromarray(alpha))
    opaque = np.asarray(image.convert("RGB")).astype(np.int32)
    got = pixels(encode(image))
    assert (got[4:, :20] == 255).all()
    np.testing.assert_array_equal(got[4:, 20:], opaque[4:, 20:])
    half = np.round(opaque[:4] * (128 / 255) + 255 * (127 / 255))
    assert np.abs(got[:4] - half).max() <= 1


def test_palette_transparency_is_white():
    image = Image.new("P", (16, 16), 0)
    image.putpalette([200, 0, 0, 0, 0, 200])
    image.paste(1, (8, 0, 16, 16))
    got = pixels(encode(image, transparency=0))
    assert (got[:, :8] == 255).all() and (got[:, 8:] == (0, 0, 200)).all()
    assert (pixels(encode(image))[:, :8] == (200, 0, 0)).all()


@pytest.mark.parametrize(
    ("depth", "colour", "transparent", "row", "expected"),
    [
        (8, 2, (10, 20, 30), bytes([10, 20, 30, 1, 20, 30]), (255, 1)),
        (16, 0, (0,), struct.pack(">HH", 0, 30000), (255, 117)),
        (16, 0, (40000,), struct.pack(">HH", 40000, 40001), (255, 156)),
        (16, 2, (0x1234, 0, 0), struct.pack(">6H", 0x1234, 0, 0, 0x2299, 0, 0), (255, 0x22)),
        (2, 0, (1,), bytes([0b01100000]), (255, 170)),
        (4, 0, (15,), bytes([0xF3]), (255, 51)),
        (1, 0, (0,), bytes([0b00000000]), (255, 255)),
    ],
)
def test_a_transparent_value_of_a_png_is_white_whatever_its_depth(depth, colour, transparent, row, expected):
    header = struct.pack(">IIBBBBB", 2, 9, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"tRNS", struct.pack(f">{len(transparent)}H", *transparent))]
    chunks += [(b"IDAT", zlib.compress((b"\0" + row) * 9)), (b"IEND", b"")]
    data = b"".join(struct.pack(">I", len(c)) + n + c + struct.pack(">I", zlib.crc32(n + c)) for n, c in chunks)
    got = pixels(b"\x89PNG\r\n\x1a\n" + data)
    assert tuple(got[0, :, 0]) == expected


def test_sixteen_bits_are_scaled_not_clipped():
    values = np.linspace(0, 65535, 256).reshape(16, 16).astype(np.uint16)
    got = pixels(grey16_png(values))
    expected = np.round(values / 257).astype(np.uint8)
    np.testing.assert_array_equal(got, expected[..., None].repeat(3, -1))
    wide = Image.fromarray(values.astype(np.int32))
    assert wide.mode == "I"
    np.testing.assert_array_equal(pixels(encode(wide, "TIFF")), got)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_plain_modes_keep_their_pixels(mode):
    image = picture(8, mode=mode)
    np.testing.assert_array_equal(pixels(encode(image)), np.asarray(image.convert("RGB")))


def test_cmyk_becomes_rgb():
    data = encode(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG", quality=100)
    assert check_image(data, LIMITS).mode == "CMYK"
    red, green, blue = pixels(data)[8, 8]
    assert red < 10 and green > 245 and blue > 245


@pytest.mark.parametrize("mode", ["RGBA", "P", "I;16"])
def test_a_large_picture_is_flattened_block_by_block_to_the_same_pixels(mode, monkeypatch):
    image = picture(7, 40, 37, "RGBA" if mode == "RGBA" else "L")
    if mode == "RGBA":
        image.putalpha(Image.fromarray(np.arange(37 * 40, dtype=np.uint32).reshape(37, 40).astype(np.uint8)))
    data = grey16_png(np.asarray(image).astype(np.uint16) * 257) if mode == "I;16" else encode(image)
    data = encode(image.convert("P"), transparency=3) if mode == "P" else data
    at_once = pixels(data)
    monkeypatch.setattr(images, "_BLOCK_PIXELS", 40 * 5)
    np.testing.assert_array_equal(pixels(data), at_once)


def test_a_large_picture_with_transparency_takes_twice_its_own_memory():
    """88 million pixels: 4 bytes each as RGBA, the same as RGB, and blocks. Converting all at once took 1,684 MB."""
    code = """
import io
from PIL import Image
from dataset_builders.pictures.images import open_rgb
out = io.BytesIO()
Image.new("RGBA", (9400, 9400), (10, 200, 30, 77)).save(out, "PNG", compress_level=1)
rss = lambda name: int(open("/proc/self/status").read().partition(name + ":")[2].split()[0]) // 1024
open("/proc/self/clear_refs", "w").write("5")
before = rss("VmRSS")
open_rgb(out.getvalue())
print(rss("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 600 < int(done.stdout) < 900


def test_animation_gives_its_first_frame():
    first, second = picture(9), picture(10)
    data = encode(first, "WEBP", save_all=True, append_images=[second], lossless=True)
    np.testing.assert_array_equal(pixels(data), np.asarray(first))


def test_preview_puts_pictures_side_by_side_and_never_enlarges():
    sheet = open_rgb(preview_png([png(1, 100, 50), png(2, 20, 20)], 50))
    assert sheet.size == (50 + 4 + 20, 25)


def test_a_png_keeps_its_values():
    values = np.arange(64, dtype=np.uint8).reshape(8, 8)
    np.testing.assert_array_equal(pixels(pixels_png(values))[..., 0], values)
    assert enlarge_grey(values, 24, 16).shape == (16, 24)
