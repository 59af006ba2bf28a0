"""Pixels against transformers' torchvision processor itself, where torchvision can be imported.

How to have it for this one run: tests/helpers/torchvision_reference.py. Everywhere else its recorded digests stand in
(tests/stages/encode/test_encode_image.py).
"""

import numpy as np
import pytest

from dataset_builders.contracts.tokenized import TokenizedSample
from dataset_builders.pictures.pixels import encode_image, pixel_values
from tests.helpers.pixels import image_config, pixel_cases
from tests.helpers.samples import make_image, make_sample
from tests.helpers.torchvision_reference import reference_pixels, torchvision_version

_VERSION = torchvision_version()  # mended where it does not load by itself, before transformers' models import it

from stages.encode.chat import ChatEncoder  # noqa: E402
from stages.encode.images import load_image_config  # noqa: E402
from stages.tokenize.second_opinion import ProcessorCheck  # noqa: E402
from tests.helpers.tiny_model import tiny_hf_dir  # noqa: E402


@pytest.mark.skipif(_VERSION is None, reason="torchvision is not installed, and need not be")
def test_bit_equal_to_the_reference_itself():
    jpegs = [make_image(w, h, seed=w, image_format="JPEG") for w, h in ((448, 640), (900, 701), (33, 47), (1024, 300))]
    cases = [*((case.data, case.config) for case in pixel_cases()), *((data, image_config()) for data in jpegs)]
    assert len(cases) >= 100
    for data, config in cases:
        patches, grid = encode_image(data, config)
        expected, expected_grid = reference_pixels(data, config)
        assert grid.tolist() == expected_grid.tolist()
        assert np.array_equal(pixel_values(patches, config.patch_format), expected)


@pytest.mark.skipif(_VERSION is None, reason="torchvision is not installed, and need not be")
def test_the_check_of_what_is_written_asks_the_reference():
    config = load_image_config(tiny_hf_dir())
    chat = ChatEncoder(tiny_hf_dir())
    check = ProcessorCheck(tiny_hf_dir(), config, chat)
    assert check.pixels_against == f"torchvision {_VERSION}"
    for number in range(8):
        sample = make_sample(number)
        encoded = [encode_image(image, config) for image in sample.images]
        grids = np.array([grid for _, grid in encoded], np.int32).reshape(-1, 3)
        patches = np.concatenate([np.zeros((0, 768), np.uint8), *(patches for patches, _ in encoded)])
        ids, mask = chat.encode(sample.messages, grids)
        stored = TokenizedSample(
            key=sample.key, input_ids=ids, loss_mask=mask, image_grid_thw=grids, patches=patches.copy()
        )
        check.check(sample, stored)
        if sample.images:
            stored.patches[-1, -1] ^= 1
            with pytest.raises(AssertionError, match="is not what transformers makes"):
                check.check(sample, stored)
