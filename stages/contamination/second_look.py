"""The second look at two images that look alike: how far apart they are at their own size.

A copy may be encoded again, resized, cropped by a few per cent, made grey, brighter or darker. None of this changes
much of what a part of it shows, while one other word in a form changes that part completely. So the two images are laid
over each other, and the block of 8 x 8 pixels that differs most, beside its own contrast, decides.
"""

import numpy as np
from PIL import Image

from dataset_builders.pictures.images import read_rgb

_SIDE = 1536  # pixels of the longer side, at most: limits time and memory of a pair
# Longer side, side of a block, grey levels that are added to a block's contrast, and the largest difference of a copy.
# Small images show faint differences of large parts, such as two x-rays, since noise is averaged away in them.
_SMALL = 64  # images with a smaller side are not aligned: two digits of one class would fit
_SCALES = ((_SIDE, 8, 8.0, 0.6), (_SMALL, 16, 2.0, 0.28))
_MAX_LEVELS = 12.0  # by which a block may differ in Cb or Cr if both are in colour, and in lightness if one is grey
_GREY = 6.0  # levels of Cb and Cr that an image without colour may have
MAX_GAIN = 1.33  # by which a copy may have more contrast
_MAX_BRIGHTER = 1.5  # contrasts by which a copy may be brighter; two sheets of one colour each have none
_MARGIN = 0.03  # of each side: what a copy may have lost there
_LEVELS = (32, 64, 128, 256)  # longer sides at which the images are aligned, one after the other
_ROUNDS = 6
_REACH = np.array([[0, 0, 1 - 2 * _MARGIN, 1 - 2 * _MARGIN], [2 * _MARGIN, 2 * _MARGIN, 1, 1]])  # of the corners
_WHOLE = np.array([0.0, 0.0, 1.0, 1.0])  # a box: left, top, right, bottom, as shares of the sides


def apart(one: bytes, other: bytes) -> float:
    """Return how far two encoded images are apart: 0 for equal pixels, up to 1 for a copy, more for other images. It is
    the difference in the block that differs most, as a share of the largest that a copy has. Raises SkipSample."""
    small, large = sorted((_read(one), _read(other)), key=lambda image: max(image.size))
    if min(large.size) >= 2 * min(small.size):
        large = large.resize(small.size, Image.Resampling.LANCZOS)
    found = _apart(small, large, _WHOLE, _WHOLE)
    if found <= 1 or min(small.size) < _SMALL:
        return found
    return min(found, _apart(small, large, *_overlap(small, large)))


def _read(data: bytes) -> Image.Image:
    image = Image.fromarray(read_rgb(data)).convert("YCbCr")
    return image if max(image.size) <= _SIDE else image.resize(_scaled(image, _SIDE), Image.Resampling.LANCZOS)


def _scaled(image: Image.Image, side: int) -> tuple[int, int]:
    """Return width and height for this longer side, at least 8."""
    width, height = (max(8, round(size * side / max(image.size))) for size in image.size)
    return width, height


def _part(image: Image.Image, box: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return a box of a YCbCr image, resized to (width, height), as (height, width, 3) float32."""
    corners = np.clip(box, 0, 1) * (*image.size, *image.size)
    return np.asarray(image.resize(size, Image.Resampling.LANCZOS, box=tuple(corners.tolist())), np.float32)


def _overlap(small: Image.Image, large: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    """Return the boxes of two images that show the same, found by Gauss-Newton steps from coarse to fine."""
    # The box of the small image without its margin stays. The corners of the other box move, beside gain and offset.
    fixed = np.array([_MARGIN, _MARGIN, 1 - _MARGIN, 1 - _MARGIN])
    moved = fixed.copy()
    for level in _LEVELS:
        size = width, height = _scaled(small, level)
        wanted = _part(small, fixed, size)[..., 0]
        x, y = (np.arange(width) + 0.5)[None] / width, (np.arange(height) + 0.5)[:, None] / height
        for _ in range(_ROUNDS):
            seen = _part(large, moved, size)[..., 0]
            down, right = np.gradient(seen)
            columns = (right * (1 - x), down * (1 - y), right * x, down * y, seen, np.ones_like(seen))
            slopes = np.stack(columns, axis=-1).reshape(-1, len(columns))
            normal = slopes.T @ slopes
            damped = normal + np.diag(1e-4 * np.diag(normal) + 1e-3)  # a blank image has no slope
            step = np.linalg.solve(damped, slopes.T @ (wanted - seen).ravel())[:4] / (width, height, width, height)
            moved = np.clip(moved + np.clip(step, -0.01, 0.01), *_REACH)
    scale = (moved[2:] - moved[:2]) / (fixed[2:] - fixed[:2])
    # Both boxes are extended as far as both images reach.
    begin = np.maximum(0, fixed[:2] - moved[:2] / scale)
    end = np.minimum(1, fixed[2:] + (1 - moved[2:]) / scale)
    other = (moved[:2] + (begin - fixed[:2]) * scale, moved[2:] + (end - fixed[2:]) * scale)
    return np.concatenate([begin, end]), np.concatenate(other)


def _apart(small: Image.Image, large: Image.Image, box: np.ndarray, other_box: np.ndarray) -> float:
    """Return how far two boxes are apart. See `apart`."""
    width, height = (max(8.0, float(side)) for side in (box[2:] - box[:2]) * small.size)
    found = 0.0
    for side, block, noise, limit in _SCALES:
        scale = min(1, side / max(width, height))
        size = max(8, round(width * scale)), max(8, round(height * scale))
        one, other = _blurred(_part(small, box, size)), _blurred(_part(large, other_box, size))
        if side == _SMALL:
            coloured = [np.abs(pixels[..., 1:] - 128).max() > _GREY for pixels in (one, other)]
            # A grey copy keeps its lightness. With gain and offset, a shape of any colour would equal one of any grey.
            compared = (1, 2) if all(coloured) else (0,) if any(coloured) else ()
            for i in compared:
                rms = np.sqrt(_means(np.square(one[..., i] - other[..., i]), block))
                found = max(found, rms.max() / _MAX_LEVELS)
        light, other_light = one[..., 0], other[..., 0]
        gain = (light.std() + noise) / (other_light.std() + noise)
        brighter = abs(float(light.mean() - other_light.mean()))
        if not 1 / MAX_GAIN <= gain <= MAX_GAIN or brighter > 3 + _MAX_BRIGHTER * light.std():
            return np.inf
        contrast = np.maximum(_spread(light, block), _spread(other_light * gain, block)) + noise
        found = max(found, (_spread(light - other_light * gain, block) / contrast).max() / limit)
    return float(found)


def _blurred(pixels: np.ndarray) -> np.ndarray:
    """Return the means of 3 x 3 pixels of (h, w, 3), since an edge may lie between two pixels."""
    pixels = np.pad(pixels, ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = pixels[:-2] + pixels[1:-1] + pixels[2:]
    return (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9


def _means(pixels: np.ndarray, block: int) -> np.ndarray:
    """Return the mean of each block of some block x block pixels of (h, w)."""
    rows, columns = (np.linspace(0, side, max(1, side // block) + 1).astype(int) for side in pixels.shape)
    sums = np.add.reduceat(np.add.reduceat(pixels.astype(np.float64), rows[:-1], 0), columns[:-1], 1)
    return sums / (np.diff(rows)[:, None] * np.diff(columns))


def _spread(pixels: np.ndarray, block: int) -> np.ndarray:
    return np.sqrt(np.maximum(0, _means(np.square(pixels.astype(np.float64)), block) - _means(pixels, block) ** 2))
