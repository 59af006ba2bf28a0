"""Drawn images that look alike and differ, and copies of an image with the changes that occur in datasets."""

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

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


def form(seed: int, size: int = 550, fields: int = 12, typed: int | None = None) -> Image.Image:
    """Draw one template with a word and a number in each field; `typed` alone differs with the seed if it is given."""
    unit = size / 550
    image = Image.new("RGB", (round(425 * unit), size), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(max(6, 11 * unit))
    draw.text((30 * unit, 12 * unit), "APPLICATION FOR REIMBURSEMENT", fill="black", font=font)
    for i in range(fields):
        rng = np.random.default_rng([3, seed if typed in (None, i) else 0, i])
        y = (45 + 40 * i) * unit
        draw.text((30 * unit, y), f"{_WORDS[i % len(_WORDS)]} {i}", fill="black", font=font)
        draw.rectangle([130 * unit, y - 4 * unit, 390 * unit, y + 18 * unit], outline="black")
        text = f"{rng.choice(_WORDS)} {rng.integers(10, 9999)}"
        draw.text((138 * unit, y), text, fill="black", font=font)
    return image


def screenshot(seed: int) -> Image.Image:
    """Draw one window of a mail program with twelve other messages."""
    rng = np.random.default_rng([4, seed])
    image = Image.new("RGB", (640, 360), "#f4f5f7")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(10)
    draw.rectangle([0, 0, 640, 24], fill="#22313f")
    draw.rectangle([0, 24, 110, 360], fill="#e1e4e8")
    for i, name in enumerate(("Inbox", "Drafts", "Sent", "Spam", "Trash")):
        draw.text((12, 40 + 18 * i), name, fill="#333", font=font)
    for i in range(12):
        draw.rectangle([120, 32 + 27 * i, 630, 55 + 27 * i], fill="white")
        draw.text((128, 37 + 27 * i), " ".join(rng.choice(_WORDS, 5)), fill="#222", font=font)
        draw.text((580, 37 + 27 * i), f"{rng.integers(0, 24)}:{rng.integers(0, 60):02d}", fill="#888", font=font)
    return image


def _smooth(rng: np.random.Generator, height: int, width: int, cell: float) -> np.ndarray:
    """Return a smooth random field of mean 0 and standard deviation 1 whose spots are as large as a cell."""
    cells = max(2, round(max(height, width) / cell))
    coarse = Image.fromarray(rng.normal(size=(cells, cells)).astype(np.float32))
    field = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
    return (field - field.mean()) / field.std()


def xray(seed: int, faint: float = 2.5) -> Image.Image:
    """Draw two lungs and a spine, with smooth differences of `faint` grey levels and without noise."""
    y, x = np.mgrid[0:512, 0:512] / 512
    chest = 90 - 60 * np.exp(-((np.abs(x - 0.5) - 0.2) ** 2) / 0.02 - (y - 0.5) ** 2 / 0.06)
    chest += 30 * np.exp(-((x - 0.5) ** 2) / 0.004) + 5 * _smooth(np.random.default_rng(5), 512, 512, 40)
    chest += faint * _smooth(np.random.default_rng([5, seed]), 512, 512, 60)
    return Image.fromarray(np.clip(chest, 0, 255).astype(np.uint8)).convert("RGB")


def photo(seed: int) -> Image.Image:
    """Draw smooth colours of all sizes down to four pixels."""
    rng = np.random.default_rng([6, seed])
    light = [
        sum(share * _smooth(rng, 320, 480, cell) for cell, share in ((300, 50), (120, 35), (40, 25), (12, 15), (4, 8)))
        for _ in range(3)
    ]
    return Image.fromarray(np.clip(np.stack(light, -1) + 120, 0, 255).astype(np.uint8))


def page(seed: int) -> Image.Image:
    """Draw 44 lines of text."""
    rng = np.random.default_rng([7, seed])
    image = Image.new("RGB", (640, 830), "white")
    for line in range(44):
        ImageDraw.Draw(image).text((50, 40 + 17 * line), " ".join(rng.choice(_WORDS, 12)), fill="black")
    return image


def scanned(image: Image.Image, seed: int = 0) -> Image.Image:
    """Return a scan of a white page: turned by up to 0.15 degrees, moved, blurred, a little grey and noisy."""
    rng = np.random.default_rng([8, seed])
    moved = tuple(int(pixels) for pixels in rng.integers(-2, 3, 2))
    turned = image.rotate(
        rng.uniform(-0.15, 0.15), Image.Resampling.BICUBIC, translate=moved, fillcolor=(255, 255, 255)
    )
    pixels = np.asarray(turned.filter(ImageFilter.GaussianBlur(0.5)), np.float32) * 0.94 + 6
    noisy = pixels + 4 * rng.normal(size=(*pixels.shape[:2], 1))
    return Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))


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


def hard_copies(image: Image.Image) -> Iterator[tuple[str, bytes]]:
    """Return (name of the change, encoded image): changes that are more than `copies` makes."""
    width, height = image.size
    yield "JPEG, quality 30", encoded(image, "JPEG", quality=30)
    yield "scaled by 0.25", encoded(scaled(image, 0.25))
    yield "scaled by 0.5 and JPEG, quality 30", encoded(scaled(image, 0.5), "JPEG", quality=30)
    yield "grey", encoded(image.convert("L"))
    light = np.asarray(image, np.float32)
    for gamma in (0.85, 1.1):
        yield f"gamma {gamma}", encoded(Image.fromarray((255 * (light / 255) ** gamma).round().astype(np.uint8)))
    for gain, offset in ((1, 12), (0.9, 13)):
        changed = Image.fromarray(np.clip(gain * light + offset, 0, 255).astype(np.uint8))
        yield f"contrast {gain}, brighter by {offset}", encoded(changed)
    x, y = round(width * 0.01), round(height * 0.01)
    inner = image.crop((x, y, width - x, height - y))
    yield "cropped by 2%", encoded(inner)
    yield "cropped by 2% on two sides", encoded(image.crop((2 * x, 0, width, height - 2 * y)))
    yield "cropped by 2% and scaled back", encoded(inner.resize(image.size, Image.Resampling.BICUBIC))
    yield "cropped by 2% and JPEG, quality 30", encoded(inner, "JPEG", quality=30)
