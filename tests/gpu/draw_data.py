"""Drawn charts, pages and diagrams, enlarged to the size of photographs: python -m tests.gpu.draw_data DIRECTORY ROWS.

With images of 1,024 image tokens a bin holds as many patches as a bin of a real dataset, so a step takes as much
memory.
"""

import io
import sys
from pathlib import Path

from PIL import Image

from tests.helpers.drawn.suite import iter_suite_rows
from tests.helpers.drawn.write import ROW_SCHEMA
from tests.helpers.raw_rows import write_parquet

SUBSETS = ("chartqa", "docvqa", "ai2d")
AREA = 1_100_000  # pixels; a little over the recipe's tokenize.max_pixels


def enlarge(picture: bytes) -> bytes:
    """Return the image enlarged to `AREA` pixels, as a JPEG."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    scale = (AREA / (image.width * image.height)) ** 0.5
    out = io.BytesIO()
    image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC).save(
        out, "JPEG", quality=90
    )
    return out.getvalue()


def write_data(directory: Path, num_rows: int) -> None:
    """Write `num_rows` rows of each subset in the_cauldron's schema."""
    subsets: dict[str, list] = {}
    for subset, row in iter_suite_rows(0, dict.fromkeys(SUBSETS, num_rows)):
        images = [{**image, "bytes": enlarge(image["bytes"])} for image in row["images"]]
        subsets.setdefault(subset, []).append({**row, "images": images})
    for subset, rows in subsets.items():
        write_parquet(directory / subset / "train-00000-of-00001.parquet", rows, 100, ROW_SCHEMA)


if __name__ == "__main__":
    write_data(Path(sys.argv[1]), int(sys.argv[2]))
