"""Pictures of a preview: small enough to stand inside the page, and what is said under them."""

import base64
from collections.abc import Callable

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.images import PILLOW_PIXEL_LIMIT, ImageLimits, check_image, preview_png

TINY_SIDE = 128  # a picture of no longer side is enlarged, pixel by pixel
_SIDES = (640, 448, 320)  # pixels; the first whose PNG is small enough, or the last
_PNG_BYTES = 250_000
_LIMITS = ImageLimits(max_pixels=PILLOW_PIXEL_LIMIT, min_side=1)


def data_uri(draw: Callable[[int], bytes]) -> str:
    """A picture as the source of an <img>.

    Args:
        draw: side in pixels -> a PNG within side x side.
    """
    png = b""
    for side in _SIDES:
        png = draw(side)
        if len(png) <= _PNG_BYTES:
            break
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def picture_html(data: bytes, name: str) -> tuple[str, str]:
    """An encoded image as training sees it (upright, transparency on white), and its size and format in words.

    Args:
        name: id of the <img>.

    Returns:
        HTML of the picture, or of a box that says why there is none; and plain text.
    """
    try:
        info = check_image(data, _LIMITS, decode=False)
        source = data_uri(lambda side: preview_png([data], side))
    except SkipSample as skip:
        return f'<div class="lost" id="{name}">cannot be shown: {skip.reason}</div>', "no picture"
    tiny = ' class="tiny"' if max(info.width, info.height) <= TINY_SIDE else ""
    turned = f", turned by EXIF {info.orientation}" if info.orientation != 1 else ""
    words = f"{info.width} x {info.height} px, {info.format} {info.mode}{turned}"
    return f'<img{tiny} id="{name}" alt="" src="{source}">', words
