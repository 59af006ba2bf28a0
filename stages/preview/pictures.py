"""Images in a preview: small enough to be embedded in the page, with captions."""

from collections.abc import Callable

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.pictures.images import PILLOW_PIXEL_LIMIT, ImageLimits, check_image, preview_png
from stages.pages.report import data_uri

TINY_SIDE = 128  # an image with both sides up to this length is enlarged, pixel by pixel
_SIDES = (640, 448, 320)  # pixels; the first side whose PNG is small enough is used, or the last
_PNG_BYTES = 250_000
_LIMITS = ImageLimits(max_pixels=PILLOW_PIXEL_LIMIT, min_side=1)


def small_picture(draw: Callable[[int], bytes]) -> str:
    """Return an image as the source of an <img>.

    Args:
        draw: side in pixels -> a PNG that fits into side x side.
    """
    for side in _SIDES:
        png = draw(side)
        if len(png) <= _PNG_BYTES:
            break
    return data_uri(png)


def describe_picture(data: bytes) -> dict[str, object]:
    """Return an encoded image as training gets it (upright, transparency on white), and its size and format in words.

    Returns:
        `source` of the <img> and `is_tiny`, or `lost`, the reason why there is no image; and `words`.
    """
    try:
        info = check_image(data, _LIMITS, decode=False)
        source = small_picture(lambda side: preview_png([data], side))
    except SkipSample as skip:
        return {"source": None, "lost": skip.reason, "words": "no picture"}
    turned = f", turned by EXIF {info.orientation}" if info.orientation != 1 else ""
    words = f"{info.width} x {info.height} px, {info.format} {info.mode}{turned}"
    return {"source": source, "is_tiny": max(info.width, info.height) <= TINY_SIDE, "words": words}
