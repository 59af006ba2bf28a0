"""Drawn images that look alike and differ, and copies of an image with the changes that occur in datasets."""

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw

_WORDS = ("total", "tax", "cash", "change", "coffee", "bread", "milk", "price", "amount", "order", "net", "gross")


def chart(seed: int) -> Image.Image:
    """Draw six bars, or a line through six points, in the same axes and in the same colour."""
    rng = np.random.default_rng([1, seed])
    image = Image.new("RGB", (480, 320), "white")
    draw = ImageDraw.Draw(image)
    draw.line([(50, 20), (50, 280), (460, 280)], fill="black")
    tops = [(70 + 65 * i, 280 - 2.4 * int(value)) for i, value in enumerate(rng.integers(5, 100, 6))]
    for left, top in tops if seed % 2 else ():
        draw.rectangle([left, top, left + 40, 280], fill="#4472c4")
    if not seed % 2:
        draw.line(tops, fill="#4472c4", width=3)
    draw.text((150, 5), f"Sales by region {seed % 7}", fill="black")
    return image


def receipt(seed: int) -> Image.Image:
    """Draw about twenty lines of three words and a price on white paper."""
    rng = np.random.default_rng([2, seed])
    image = Image.new("RGB", (300, 420), "white")
    draw = ImageDraw.Draw(image)
    for line in range(rng.integers(18, 25)):
        draw.text((10, 10 + 16 * line), " ".join(rng.choice(_WORDS, 3)), fill="black")
        draw.text((230, 10 + 16 * line), f"{rng.integers(1, 99)}.{rng.integers(0, 99):02d}", fill="black")
    return image


def encoded(image: Image.Image, image_format: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, image_format, **options)
    return out.getvalue()


def scaled(image: Image.Image, by: float) -> Image.Image:
    return image.resize((round(image.width * by), round(image.height * by)), Image.Resampling.BICUBIC)


def copies(image: Image.Image) -> Iterator[tuple[str, bytes]]:
    """Return (name of the change, encoded image): different bytes of an image that a person would call the same."""
    yield "JPEG, quality 70", encoded(image, "JPEG", quality=70)
    for by in (0.5, 0.75, 1.5, 2):
        yield f"scaled by {by}", encoded(scaled(image, by))
    yield "scaled by 0.5 and JPEG, quality 70", encoded(scaled(image, 0.5), "JPEG", quality=70)
