"""The only module that opens raw images: which images are refused, and how each pixel format is converted to 8-bit RGB.

    1, L, P, YCbCr, CMYK       Pillow's conversion (of an animation or a multi-page file: the first frame)
    RGBA, LA, PA, transparency composited on white, as a reader of the page would see it
    I;16, I                    16-bit grey scaled to 8 bits, 65535 -> 255; wider values are refused
    F, LAB, HSV                refused as bad_mode: there is no agreement on what their range means

EXIF orientation is applied; an image with a broken EXIF block keeps its stored orientation.

Pillow identifies the format. simplejpeg decodes most JPEG files, faster and to the same bits, because both use
libjpeg-turbo with its exact integer transform. It also reports damage that Pillow does not.
"""

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from PIL import Image

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import one_line

PILLOW_PIXEL_LIMIT = 89_478_485  # Pillow's own guard warns above this number, and raises at twice the number
_BLOCK_PIXELS = 1 << 20  # pixels whose transparency is composited on white at a time
MAX_ASPECT = 200  # longer side / shorter side; smart_resize of the Qwen processors refuses more

# Left out on purpose: EPS, which Pillow hands to Ghostscript, a program that runs code from the file; ICO, whose header
# need not give the size of the image inside.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_GREY_16 = ("I", "I;16", "I;16B", "I;16L", "I;16N")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", *_GREY_16)
_ENDINGS = {b"\x89PNG": b"IEND\xaeB`\x82", b"\xff\xd8\xff": b"\xff\xd9", b"GIF8": b";"}
_PNG_EXIF = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")  # chunks of a PNG that may have an orientation
_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


_JPEG_FORMATS = ("JPEG", "MPO")  # Pillow's names; MPO: a JPEG with further images after it, as phones write them
# Every scan of a progressive file passes over all pixels (0.6 ns per pixel), however few bytes the scan has. Encoders
# write about 10 scans. 100 is also libtiff's limit for JPEG inside TIFF; together the two limits bound the decoding
# time of an image of any size.
MAX_SCANS = 100
MAX_SCAN_PIXELS = 1 << 31  # scans * width * height: 24 scans of Pillow's largest image

# Files that simplejpeg decodes to Pillow's bits (tests/dataset_builders/pictures/test_pixels.py): baseline and
# progressive frames of grey, or of three components with these sampling factors. Not: four components (CMYK, YCCK).
_PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)
_SEQUENTIAL_FRAMES = (0xC0, 0xC1)
_SAMPLINGS = {((1, 1),), *(((h, v), (1, 1), (1, 1)) for h, v in ((1, 1), (2, 1), (2, 2), (1, 2), (4, 1)))}
_START_OF_SCAN = b"\xff\xda"
# The next marker as libjpeg-turbo finds it: not a stuffed zero, a fill byte, a restart, or a code without a meaning.
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
_WITHOUT_LENGTH, _END_OF_IMAGE = 0xD8, 0xD9
# libjpeg-turbo's warnings of missing or undecodable pixel data -> the skip reason. Its other warnings (excess bytes
# before a marker, an unknown JFIF version, scan parameters) occur in files with complete images and are ignored.
_JPEG_DAMAGE = {
    "premature end": "truncated_image",  # in a scan's data, or the file has no end mark
    "bad Huffman code": "decode_error",
    "bad arithmetic code": "decode_error",
    "instead of RST": "decode_error",  # a restart interval is missing
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLimits:
    """Limits that are checked from the header, before a pixel is decoded."""

    max_pixels: int  # width * height, at most PILLOW_PIXEL_LIMIT
    min_side: int  # the shorter side in pixels


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The facts of an image that passed the checks."""

    width: int  # in pixels, after EXIF orientation, as `open_rgb` gives them
    height: int
    mode: str  # Pillow's name of the pixel format in the file
    format: str  # Pillow's name of the file format
    orientation: int  # of EXIF, 1 to 8; 1 also if there is none, it is broken, or the format is TIFF


def check_image(data: bytes, limits: ImageLimits, decode: bool = True) -> ImageInfo:
    """Decode the whole image, and return its facts.

    Without `decode` only the header is read. Then an image that is cut or damaged after its header passes, 32-bit grey
    that is out of range passes, and EXIF after a PNG's pixels is not seen.

    Raises:
        SkipSample: decode_error, truncated_image, bomb, too_small, aspect or bad_mode.
    """
    image = _open(data)
    check_size(*image.size, limits)
    _check_mode(image)
    if not decode:
        # Pillow decodes a PNG to find EXIF that is not before its pixels.
        orientation = 1 if image.format == "PNG" and "exif" not in image.info else _orientation(image)
    else:
        orientation = _check_pixels(image, data)
    width, height = image.size if orientation < 5 else image.size[::-1]  # 5 to 8 turn by a quarter
    return ImageInfo(width, height, image.mode, image.format or "?", orientation)


def open_rgb(data: bytes) -> Image.Image:
    """Return the image as 8-bit RGB, upright, with transparency on white.

    Raises:
        SkipSample: decode_error, truncated_image, bomb (by Pillow's own guard) or bad_mode.
    """
    image = _open(data)
    orientation = _load(image, data)
    with _skipping(data):
        rgb = _to_rgb(image)
    return rgb.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else rgb


def read_rgb(data: bytes, whole: bool = False) -> np.ndarray:
    """Return the result of `open_rgb` as (height, width, 3) uint8, faster.

    With `whole` a JPEG with damaged pixel data is refused, as by `check_image`; else the data that are left are read.
    """
    image = _open(data)
    pixels = decode_jpeg(image, data)
    if pixels is None:
        rgb = np.asarray(open_rgb(data))
        if whole and image.format in _JPEG_FORMATS:
            _refuse_damage(_jpeg_warning(image, data))
        return rgb
    orientation = _orientation(image)
    if orientation in _TRANSPOSE:
        return np.asarray(Image.fromarray(pixels).transpose(_TRANSPOSE[orientation]))
    return pixels


def image_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) as stored, from the header; EXIF may swap the two. Raises SkipSample."""
    return _open(data).size[::-1]


def header_size(data: bytes) -> tuple[tuple[int, int], int]:
    """Return (width, height) as stored and the EXIF orientation, 1 to 8, of an image, from its header if it can be.

    Raises:
        SkipSample: the bytes are no image.
    """
    image = _open(data)
    # Pillow decodes a whole PNG to look for EXIF after its pixels.
    may_turn = image.format != "PNG" or "exif" in image.info or any(mark in data for mark in _PNG_EXIF)
    return image.size, _orientation(image) if may_turn else 1


def preview_png(images: Sequence[bytes], side: int) -> bytes:
    """Return a PNG of the images in a row, each shrunk to fit into side x side pixels, never enlarged."""
    thumbnails = [open_rgb(data) for data in images]
    for image in thumbnails:
        image.thumbnail((side, side))
    gap = 4
    width = sum(image.width for image in thumbnails) + gap * (len(thumbnails) - 1)
    sheet = Image.new("RGB", (width, max(image.height for image in thumbnails)), "white")
    x = 0
    for image in thumbnails:
        sheet.paste(image, (x, (sheet.height - image.height) // 2))
        x += image.width + gap
    return _png(sheet)


def enlarge_grey(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Resize (h, w) uint8 to (height, width) uint8 by bicubic interpolation."""
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))


def shrink_grey(rgb: np.ndarray, side: int) -> np.ndarray:
    """Convert (h, w, 3) uint8 to (side, side) uint8: ITU-R 601 luma, scaled by Lanczos without regard to aspect."""
    # Pillow computes both in fixed point, so every machine gives the same result.
    grey = Image.fromarray(rgb).convert("L")
    return np.asarray(grey.resize((side, side), Image.Resampling.LANCZOS))


def pixels_png(pixels: np.ndarray) -> bytes:
    """Encode (h, w) or (h, w, 3) uint8 as a PNG."""
    return _png(Image.fromarray(pixels))


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _open(data: bytes) -> Image.Image:
    """Read the header. No pixel is decoded here."""
    if not data:
        raise SkipSample("empty", "the image has zero bytes")
    with _skipping(data):
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    if image.format in _JPEG_FORMATS:
        _check_scans(data, *image.size)
    # In the PNG's header chunk, byte 24 is the depth of a channel in bits and byte 25 the colour type.
    if image.format == "PNG" and "transparency" in image.info:
        image.info["transparency"] = _as_decoded(image.info["transparency"], depth=data[24], is_grey=data[25] == 0)
    return image


def _as_decoded(transparency: Any, depth: int, is_grey: bool) -> Any:
    """Return the transparent value of a PNG (grey, colour, or the alpha of a palette) as Pillow decodes its pixels."""
    # Pillow gives grey of 2 and 4 bits and colours of 16 bits as 8 bits, but leaves the transparent value as it is.
    if is_grey and depth in (2, 4):
        return transparency * 255 // ((1 << depth) - 1)
    return tuple(value >> 8 for value in transparency) if depth == 16 and not is_grey else transparency


@contextlib.contextmanager
def _skipping(data: bytes) -> Iterator[None]:
    """Convert any error of Pillow in the block to SkipSample: hostile bytes make its parsers raise nearly anything."""
    try:
        yield
    except MemoryError:  # the machine's fault, not the image's
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise SkipSample("bomb", str(error)) from None
    except Exception as error:
        text = one_line(error) or type(error).__name__
        text = text if not text.startswith("cannot identify image file") else "no image format that is read here"
        reason = "truncated_image" if "truncated" in text.lower() or _is_cut(data) else "decode_error"
        raise SkipSample(reason, f"{len(data)} bytes: {text}") from None


def _check_pixels(image: Image.Image, data: bytes) -> int:
    """Decode every coded bit; return the EXIF orientation."""
    warning = _jpeg_warning(image, data) if image.format in _JPEG_FORMATS else ""
    if not warning and _is_plain_jpeg(image, data):
        return _orientation(image)
    orientation = _load(image, data)
    _refuse_damage(warning)
    return orientation


def check_size(width: int, height: int, limits: ImageLimits) -> None:
    """Raise SkipSample (bomb, too_small or aspect) for an image or a video of so many pixels."""
    if width * height > limits.max_pixels:
        raise SkipSample("bomb", f"{width} x {height} pixels, the limit is {limits.max_pixels} in all")
    if min(width, height) < limits.min_side:
        raise SkipSample("too_small", f"{width} x {height} pixels, the limit is {limits.min_side} a side")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise SkipSample("aspect", f"{width} x {height} pixels, the longer side is over {MAX_ASPECT} times the shorter")


def _check_mode(image: Image.Image) -> None:
    if image.mode not in _MODES:
        raise SkipSample("bad_mode", f"mode {image.mode} of a {image.format} file")
    if image.mode in ("P", "PA") and image.palette is None:
        raise SkipSample("decode_error", f"a {image.format} file of palette indexes without a palette")


def _load(image: Image.Image, data: bytes) -> int:
    """Decode every pixel and check the mode; return the EXIF orientation."""
    _check_mode(image)
    with _skipping(data):
        image.load()
    if image.mode == "I":
        low, high = image.getextrema()
        if low < 0 or high > 65535:
            raise SkipSample("bad_mode", f"32-bit grey with values from {low} to {high}; 0 to 65535 is agreed")
    return _orientation(image)


def _orientation(image: Image.Image) -> int:
    if image.format == "TIFF":  # Pillow turns it, and its header's size, by itself
        return 1
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # a broken EXIF or XMP block is no reason to lose the image
        return 1
    return value if isinstance(value, int) and value in _TRANSPOSE else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode not in _GREY_16 and not image.has_transparency_data:
        return image.convert("RGB")
    # Converted in blocks of rows, since the intermediate steps take the memory of four more images.
    rgb = Image.new("RGB", image.size)
    block_rows = max(1, _BLOCK_PIXELS // image.width)
    for top in range(0, image.height, block_rows):
        box = (0, top, image.width, min(top + block_rows, image.height))
        rgb.paste(_flatten(image.crop(box)), box)
    return rgb


def _flatten(image: Image.Image) -> Image.Image:
    """Convert 16-bit grey, or an image with transparency, to RGB."""
    if image.mode in _GREY_16:
        wide = np.asarray(image).astype(np.uint32)
        grey = ((wide + 128) // 257).astype(np.uint8)  # rounded: 65535 -> 255
        grey[wide == image.info.get("transparency", -1)] = 255
        return Image.fromarray(grey).convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _is_cut(data: bytes) -> bool:
    """Whether the bytes start like a known format but lack its end."""
    if data[:4] == b"RIFF":
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    ending = next((end for magic, end in _ENDINGS.items() if data.startswith(magic)), b"")
    return ending not in data[-64 if len(ending) > 1 else -1 :]  # cameras and servers append a few bytes after the end


class _JpegHead(NamedTuple):
    """Facts from a JPEG file's headers up to its first scan."""

    frame: int  # the frame header's marker, 0xC0 to 0xCF (ITU T.81, table B.1); 0 if there is none
    num_components: int  # of the frame
    num_in_scan: int  # components in the first scan


def _check_scans(data: bytes, width: int, height: int) -> None:
    """Raise SkipSample (bomb) for a JPEG with more scans than an image of this size may have. Nothing is decoded."""
    head = _read_jpeg_head(data)
    if head.frame in _SEQUENTIAL_FRAMES and head.num_in_scan == head.num_components:
        return  # one scan with all components interleaved: libjpeg-turbo refuses a second scan
    limit = min(MAX_SCANS, MAX_SCAN_PIXELS // (width * height))
    if data.count(_START_OF_SCAN) > limit and _count_scans(data) > limit:
        raise SkipSample("bomb", f"a JPEG of {_count_scans(data)} scans, the limit is {limit} at {width} x {height}")


def decode_jpeg(image: Image.Image, data: bytes) -> np.ndarray | None:
    """Decode the stored pixels to (height, width, 3) uint8, not rotated; None if Pillow must read the file.

    Args:
        image: `data`, opened by Pillow and not yet decoded.
    """
    if not _is_plain_jpeg(image, data):
        return None
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB")
    except MemoryError:
        raise
    except Exception:  # includes warnings of the decoder: Pillow decides about such a file
        return None
    return pixels if pixels.shape == (image.height, image.width, 3) else None


def _jpeg_warning(image: Image.Image, data: bytes) -> str:
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


def _refuse_damage(warning: str) -> None:
    """Raise SkipSample if a `_jpeg_warning` means that pixel data are missing or cannot be decoded."""
    for text, reason in _JPEG_DAMAGE.items():
        if text.lower() in warning.lower():
            raise SkipSample(reason, warning)


def _is_plain_jpeg(image: Image.Image, data: bytes) -> bool:
    """Whether simplejpeg gives Pillow's bits for this file, if it is whole."""
    if image.format not in _JPEG_FORMATS or image.mode not in ("L", "RGB"):
        return False
    sampling = tuple((h, v) for _, h, v, _ in image.layer)
    return sampling in _SAMPLINGS and _read_jpeg_head(data).frame in _PLAIN_FRAMES


def _read_jpeg_head(data: bytes) -> _JpegHead:
    frame = num_components = 0
    place = 2
    while place + 4 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == _START_OF_SCAN[1]:
            return _JpegHead(frame, num_components, data[place + 4] if place + 4 < len(data) else 0)
        # C4, C8 and CC are Huffman tables, a reserved code and arithmetic conditioning, and no frames.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame, num_components = marker, data[place + 9] if place + 9 < len(data) else 0
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return _JpegHead(0, 0, 0)


def _count_scans(data: bytes) -> int:
    """Count the scans up to the end of the image, without scans of a thumbnail or of a further image after it."""
    scans, place = 0, 2
    while match := _JPEG_MARKER.search(data, place):
        place, marker = match.end(), data[match.end() - 1]
        if marker == _END_OF_IMAGE:
            break
        if marker != _WITHOUT_LENGTH:
            scans += marker == _START_OF_SCAN[1]
            place += int.from_bytes(data[place : place + 2], "big")
    return scans
