"""Pixels against transformers' torchvision processor itself, where torchvision can be imported.

How to have it for this one run: tests/helpers/torchvision_reference.py. Everywhere else its recorded digests stand in
(tests/stages/test_encode_image.py).
"""

import numpy as np
import pytest

from stages.encode_image import encode_image, pixel_values
from tests.helpers.pixels import image_config, pixel_cases
from tests.helpers.samples import make_image
from tests.helpers.torchvision_reference import reference_pixels, torchvision_version


@pytest.mark.skipif(torchvision_version() is None, reason="torchvision is not installed, and need not be")
def test_bit_equal_to_the_reference_itself():
    jpegs = [make_image(w, h, seed=w, image_format="JPEG") for w, h in ((448, 640), (900, 701), (33, 47), (1024, 300))]
    cases = [*((case.data, case.config) for case in pixel_cases()), *((data, image_config()) for data in jpegs)]
    assert len(cases) >= 100
    for data, config in cases:
        patches, grid = encode_image(data, config)
        expected, expected_grid = reference_pixels(data, config)
        assert grid.tolist() == expected_grid.tolist()
        assert np.array_equal(pixel_values(patches, config.patch_format), expected)
