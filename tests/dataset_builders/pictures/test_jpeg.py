"""JPEG files: valid and unusual ones are read, damaged ones are refused with a reason, and none takes more than
seconds."""

import io
import struct
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.pictures import images
from dataset_builders.pictures.images import ImageLimits, check_image, image_size, open_rgb, read_rgb
from tests.helpers.raw_rows import encode, jpeg_with_exif, orientation_exif, picture

pytestmark = pytest.mark.promise(
    "Images that cost seconds per kilobyte, damaged JPEGs, endless chat templates and links out of a source "
    "are refused with a reason."
)

LIMITS = ImageLimits(max_pixels=89_478_485, min_side=8)
_SCAN, _END = b"\xff\xda", b"\xff\xd9"


def verdict(data: bytes) -> object:
    try:
        return check_image(data, LIMITS)
    except SkipSample as skip:
        return skip.reason


def reads(data: bytes, whole: bool) -> str:
    try:
        read_rgb(data, whole)
    except SkipSample as skip:
        return skip.reason
    return "read"


def scenery(width: int = 160, height: int = 128) -> Image.Image:
    """Return slopes with noise: every block of the file holds many coefficients, as in a photo."""
    random = np.random.RandomState(3)
    rows, columns = np.mgrid[0:height, 0:width]
    slopes = np.stack([rows * 3 + columns, rows + columns * 5, 255 - rows], -1)
    return Image.fromarray(((slopes + random.randint(0, 30, (height, width, 3))) % 256).astype(np.uint8))


def scan_places(data: bytes) -> list[int]:
    return [place for place in range(len(data)) if data.startswith(_SCAN, place)]


def with_scans(data: bytes, scans: int) -> bytes:
    """Return the progressive file with its last scan repeated."""
    places = scan_places(data)
    return data[:-2] + data[places[-1] : -2] * (scans - len(places)) + _END


_KINDS: dict[str, dict[str, object]] = {
    "4:2:0": {},
    "4:4:4": {"subsampling": 0},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_rows": 1},
    "progressive with restart markers": {"progressive": True, "restart_marker_blocks": 3},
    "optimized": {"optimize": True, "quality": 30},
    "grey": {"mode": "L"},
    "CMYK": {"mode": "CMYK"},
    "CMYK progressive": {"mode": "CMYK", "progressive": True},
}


def jpeg_of(kind: str, image: Image.Image | None = None) -> bytes:
    options = {"quality": 85, **_KINDS[kind]}
    return encode((image or scenery()).convert(options.pop("mode", "RGB")), "JPEG", **options)


def _put_in(data: bytes, segment: bytes, marker: int) -> bytes:
    return data[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(segment) + 2) + segment + data[2:]


# Odd but legal files, or files so common that every program reads them: all are whole images.
_ODD = {
    "bytes behind the end": lambda data: data + b"\0" * 40,
    "text behind the end": lambda data: data + b"hello",
    "another picture behind the end": lambda data: data + data,
    "a second end mark": lambda data: data + _END,
    "padding before the end mark": lambda data: data[:-2] + b"\0" * 16 + _END,
    "fill bytes before the end mark": lambda data: data[:-2] + b"\xff\xff\xff" + _END,
    "unknown JFIF version": lambda data: data.replace(b"JFIF\0\1\1", b"JFIF\0\3\1"),
    "a comment": lambda data: _put_in(data, b"drawn by nobody", 0xFE),
    "a colour profile with bytes like scans": lambda data: _put_in(data, b"ICC_PROFILE\0\1\1" + _SCAN * 1000, 0xE2),
    "a thumbnail": lambda data: _put_in(data, b"JFXX\0\x10" + encode(picture(1), "JPEG"), 0xE0),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_whole_files_are_read_however_odd(kind):
    data = jpeg_of(kind)
    expected = np.asarray(open_rgb(data))
    for name, change in {"as it is": bytes, **_ODD}.items():
        odd = change(data)
        assert check_image(odd, LIMITS).width == 160, name
        np.testing.assert_array_equal(read_rgb(odd, whole=True), expected, name)


def test_exif_and_other_samplings_are_read():
    turned = jpeg_with_exif(picture(5, 48, 32), orientation_exif(6))
    assert check_image(turned, LIMITS).orientation == 6 and read_rgb(turned, whole=True).shape == (48, 32, 3)
    for sampling in ("440", "411"):
        data = simplejpeg.encode_jpeg(np.asarray(scenery()), 85, colorsubsampling=sampling)
        assert check_image(data, LIMITS).mode == "RGB" and read_rgb(data, whole=True).shape == (128, 160, 3)


def test_a_file_of_several_pictures_gives_the_first():
    data = encode(scenery(), "MPO", save_all=True, append_images=[picture(2)])
    info = check_image(data, LIMITS)
    assert (info.format, info.width) == ("MPO", 160)
    np.testing.assert_array_equal(read_rgb(data, whole=True), np.asarray(open_rgb(data)))
    assert reads(data[: len(data) // 2] + _END, whole=True) == "truncated_image"


def _swapped_restart(data: bytes) -> bytes:
    first, second = (data.index(mark) for mark in (b"\xff\xd1", b"\xff\xd5"))
    return data[:first] + data[second:]


# Damage that Pillow reads without an error: (kinds of file, the damage, reason)
_DAMAGE = {
    "cut at two thirds, end mark put behind": (
        _KINDS,
        lambda data: data[: len(data) * 2 // 3] + _END,
        "truncated_image",
    ),
    "the last third is zeros": (
        ("4:4:4", "4:2:0"),
        lambda data: data[: len(data) * 2 // 3] + bytes(len(data) // 3),
        "truncated_image",
    ),
    "restart intervals are missing": (("restart markers",), _swapped_restart, "decode_error"),
}


@pytest.mark.parametrize("name", _DAMAGE)
def test_damage_that_pillow_keeps_silent_about_is_refused(name):
    kinds, damage, reason = _DAMAGE[name]
    for kind in kinds:
        data = damage(jpeg_of(kind))
        Image.open(io.BytesIO(data)).load()
        assert verdict(data) == reason, kind
        assert reads(data, whole=True) == reason, kind
        assert reads(data, whole=False) == "read", "what was tokenized before stays readable"
        assert check_image(data, LIMITS, decode=False).width == 160, "the header is sound"


@pytest.mark.parametrize("whole", [True, False])
def test_a_progressive_file_of_its_first_scans_is_whole_by_its_format_and_smoothed_as_pillow_does(whole):
    """The image is blurred, but nothing shows that more scans followed: an encoder may write such a file."""
    data = jpeg_of("progressive")
    for place in scan_places(data)[1:]:
        cut = data[:place] + _END
        np.testing.assert_array_equal(read_rgb(cut, whole), np.asarray(open_rgb(cut)))


@pytest.mark.parametrize("kind", ["progressive", "CMYK progressive", "progressive with restart markers"])
def test_scans_are_bounded(kind):
    data = jpeg_of(kind, picture(1))
    for scans in (images.MAX_SCANS, images.MAX_SCANS + 1):
        many = with_scans(data, scans)
        expected = "bomb" if scans > images.MAX_SCANS else "read"
        assert reads(many, whole=False) == expected
        for refusal in (image_size, open_rgb, lambda d: check_image(d, LIMITS, decode=False)):
            if expected == "bomb":
                with pytest.raises(SkipSample, match="a JPEG of 101 scans, the limit is 100 at 40 x 32"):
                    refusal(many)


def test_the_limit_falls_as_pictures_grow(monkeypatch):
    data = jpeg_of("progressive", picture(1))
    assert len(scan_places(data)) == 10
    monkeypatch.setattr(images, "MAX_SCAN_PIXELS", 40 * 32 * 10)
    assert reads(data, whole=True) == "read"
    with pytest.raises(SkipSample, match="a JPEG of 11 scans, the limit is 10 at 40 x 32"):
        read_rgb(with_scans(data, 11))


def test_scans_hidden_from_the_count_would_be_scans_hidden_from_the_decoder():
    """The bytes between scans would be read as a segment's length by a naive walk."""
    data = jpeg_of("progressive with restart markers", picture(1))
    places = scan_places(data)
    for between in (b"\xff\xff", b"\0\0", b"\xff\xd3", b"\xff\x02\xff\xff", b"\xff\xd8\xff\xff", b"\xff\0\xff\xff"):
        many = data[:-2] + (between + data[places[-1] : -2]) * 200 + _END
        assert reads(many, whole=False) in ("bomb", "decode_error"), between
    scan = data[places[-1] : -2]  # libjpeg-turbo skips an undefined code on its way to the next restart
    assert reads(data[:-2] + (scan[:10] + b"\xff\x02\xff\xff" + scan[10:]) * 200 + _END, whole=False) == "bomb"


def test_a_sequential_file_of_many_scans_is_refused_too():
    data = encode(picture(1), "JPEG", subsampling=0)
    place = data.index(_SCAN)
    head, body = data[:place], data[place + 14 : -2]
    one_component = _SCAN + struct.pack(">HBBBBBB", 8, 1, 1, 0, 0, 63, 0) + body
    assert reads(head + one_component * 300 + _END, whole=False) == "bomb"


def test_a_file_of_too_many_scans_is_not_decoded(monkeypatch):
    """Such files cost 0.5 s of CPU at 18 kB, and 5 s at 40 kB with data in the scans."""
    data = encode(Image.new("RGB", (1000, 1000), (90, 90, 90)), "JPEG", progressive=True)
    assert check_image(with_scans(data, 100), LIMITS).width == 1000
    monkeypatch.setattr(images.simplejpeg, "decode_jpeg", lambda *given, **options: pytest.fail("decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    assert [verdict(with_scans(data, scans)) for scans in (110, 3000, 40_000)] == ["bomb"] * 3


def test_libtiff_bounds_the_scans_of_a_jpeg_inside():
    tiff = encode(Image.new("L", (16, 16), 90), "TIFF", compression="jpeg")
    assert read_rgb(tiff, whole=True).shape == (16, 16, 3)
    stream = with_scans(encode(Image.new("L", (16, 16), 90), "JPEG", progressive=True), 101)
    offset, length = (struct.pack("<HHII", tag, kind, 1, 0)[:8] for tag, kind in ((273, 4), (279, 4)))
    inside = bytearray(tiff)
    directory = struct.unpack_from("<I", inside, 4)[0]
    for entry in range(directory + 2, directory + 2 + 12 * struct.unpack_from("<H", inside, directory)[0], 12):
        tag = inside[entry : entry + 8]
        if tag[:2] == offset[:2]:
            inside[entry : entry + 12] = struct.pack("<HHII", 273, 4, 1, len(inside))
        elif tag[:2] == length[:2]:
            inside[entry : entry + 12] = struct.pack("<HHII", 279, 4, 1, len(stream))
    assert reads(bytes(inside) + stream, whole=False) == "decode_error"


def damaged_jpegs(rng: np.random.Generator) -> Iterator[bytes]:
    """Yield baseline, progressive and grey files, with or without restart markers: bytes changed, cut out, or end cut
    off."""
    kinds = [
        {},
        {"progressive": True},
        {"subsampling": 0},
        {"subsampling": 1, "restart_marker_rows": 1},
        {"optimize": True, "quality": 30},
    ]
    for options in kinds:
        for mode in ("RGB", "L"):
            data = encode(picture(4, 72, 56, mode), "JPEG", **options)
            yield data
            for _ in range(120):
                damaged = bytearray(data)
                for place in rng.integers(2, len(data), rng.integers(1, 4)):
                    damaged[place] = rng.integers(256)
                begin = int(rng.integers(2, len(data)))
                yield bytes([bytes(damaged), data[:begin] + data[begin + 5 :], data[:begin]][rng.integers(3)])


def test_the_check_is_pillows_verdict_but_for_named_damage(monkeypatch):
    files = list(damaged_jpegs(np.random.default_rng(1)))
    ours, warnings = [verdict(data) for data in files], []
    monkeypatch.setattr(images, "_jpeg_warning", lambda *given: warnings.append(given) or "unknown")
    pillows = [verdict(data) for data in files]
    stricter = Counter(our for our, pillow in zip(ours, pillows) if our != pillow)
    assert set(stricter) == {"truncated_image", "decode_error"} and 100 < stricter.total() < 400, stricter
    assert all(not isinstance(p, str) for our, p in zip(ours, pillows) if our != p), "never another reason"
    assert pillows.count("truncated_image") > 100 and len(warnings) > 100


def pixels_or_reason(decode: Callable[[bytes], object], data: bytes) -> object:
    try:
        return np.asarray(decode(data))
    except SkipSample as skip:
        return skip.reason


def test_damaged_files_have_pillows_pixels_or_pillows_reason():
    outcomes = Counter()
    for data in damaged_jpegs(np.random.default_rng(0)):
        ours, pillows = pixels_or_reason(read_rgb, data), pixels_or_reason(open_rgb, data)
        assert np.array_equal(ours, pillows)
        outcomes[type(ours)] += 1
    assert outcomes[str] > 80 and outcomes[np.ndarray] > 80


def test_the_check_and_tokenization_agree_on_every_damaged_file():
    for data in damaged_jpegs(np.random.default_rng(2)):
        checked = verdict(data)
        if checked not in ("too_small", "aspect", "bomb"):  # limits that tokenization does not have
            assert reads(data, whole=True) == (checked if isinstance(checked, str) else "read")


def test_a_jpeg_that_simplejpeg_warns_about_is_left_to_pillow(monkeypatch):
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.load", lambda self: pytest.fail("Pillow decoded"))
    sound = encode(picture(4, 72, 56), "JPEG")
    assert check_image(sound, LIMITS).width == 72
    with pytest.raises(pytest.fail.Exception, match="Pillow decoded"):
        check_image(sound[:-2] + b"\0" * 16 + _END, LIMITS)
