"""A drawn paper slip: lines of text in one of several fonts, then rotated, shaded, blurred and noisy like a photo.

The fonts come with matplotlib (DejaVu and STIX) and Pillow, so no installed font is needed. The same calls give the
same bytes with the same versions of Pillow and matplotlib.
"""

import functools
import importlib.metadata
import io
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

BUNDLED = "Aileron"  # Pillow's own font
FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "STIXGeneral",
    BUNDLED,
)
_ANCHORS = {"left": "lm", "center": "mm", "right": "rm"}

Quad = tuple[tuple[int, int], ...]  # four corners (x, y), clockwise from the upper left one


@dataclass(frozen=True, kw_only=True, slots=True)
class Photo:
    """The parameters of a slip's photo.

    Attributes:
        tilt: rotation about the middle of the slip, in degrees, counter-clockwise.
        shade: difference of brightness between the left and the right edge, in grey levels.
        blur: radius of a Gaussian blur in pixels; 0: none.
        noise: standard deviation of the noise of each pixel, in grey levels.
        quality: quality of the JPEG, 1 to 95.
    """

    tilt: float
    shade: float
    blur: float
    noise: float
    quality: int


class Slip:
    """A grey sheet to print on. Positions are pixels from the upper left corner; y is the middle of a line."""

    def __init__(self, width: int, height: int, paper: int, ink: int) -> None:
        self.size = (width, height)
        self._paper, self._ink = paper, ink
        self._image = Image.new("L", self.size, paper)
        self._draw = ImageDraw.Draw(self._image)

    def text(self, x: float, y: float, text: str, font: str, size: int, align: str = "left") -> Quad:
        """Print one line of text, and return the box of its ink before the tilt.

        Args:
            align: which end of the text is at x: left, center or right.
        """
        anchor, loaded = _ANCHORS[align], _font(font, size)
        self._draw.text((x, y), text, fill=self._ink, font=loaded, anchor=anchor)
        left, top, right, bottom = map(round, self._draw.textbbox((x, y), text, font=loaded, anchor=anchor))
        return ((left, top), (right, top), (right, bottom), (left, bottom))

    def rule(self, y: int, margin: int) -> None:
        """Draw a thin line across the slip."""
        self._draw.line([(margin, y), (self.size[0] - margin, y)], fill=self._ink)

    def jpeg(self, photo: Photo, rng: np.random.Generator) -> bytes:
        """Return the photo of the slip as a grey JPEG.

        Args:
            rng: source of the noise.
        """
        image = self._image.rotate(photo.tilt, Image.Resampling.BICUBIC, fillcolor=self._paper)
        image = image.filter(ImageFilter.GaussianBlur(photo.blur)) if photo.blur else image
        width, height = self.size
        grey = np.asarray(image, np.float32) + np.linspace(-photo.shade / 2, photo.shade / 2, width, dtype=np.float32)
        grey += photo.noise * rng.standard_normal((height, width), np.float32)
        out = io.BytesIO()
        Image.fromarray(np.clip(np.rint(grey), 0, 255).astype(np.uint8)).save(out, "JPEG", quality=photo.quality)
        return out.getvalue()

    def tilted(self, quad: Quad, tilt: float) -> Quad:
        """Return the corners of a box after a rotation by `tilt` degrees about the middle of the slip."""
        middle_x, middle_y = self.size[0] / 2, self.size[1] / 2
        cos, sin = math.cos(math.radians(tilt)), math.sin(math.radians(tilt))
        moved = ((x - middle_x, y - middle_y) for x, y in quad)
        return tuple((round(middle_x + cos * x + sin * y), round(middle_y - sin * x + cos * y)) for x, y in moved)


def text_width(text: str, font: str, size: int) -> float:
    """Return the width of one line of text in pixels."""
    return _font(font, size).getlength(text)


@functools.cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    if name == BUNDLED:
        return ImageFont.load_default(size=size)
    path = importlib.metadata.distribution("matplotlib").locate_file(f"matplotlib/mpl-data/fonts/ttf/{name}.ttf")
    return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
