"""Compare pixels with transformers' torchvision processor itself: `python -m tests.parity.compare_pixels`.

A process of its own, because other tests must not find torchvision: tests/parity/test_pixels.py starts it.
"""

import numpy as np

from dataset_builders.contracts.tokenized import TokenizedSample
from dataset_builders.pictures.pixels import encode_image, pixel_values
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.pixels import image_config, pixel_cases
from tests.helpers.samples import make_image, make_sample
from tests.helpers.torchvision_reference import reference_pixels, torchvision_version

_VERSION = torchvision_version()  # mended where it does not load by itself, before transformers' models import it

from stages.shared.chat_format.chat import ChatEncoder  # noqa: E402
from stages.shared.chat_format.images import load_image_config  # noqa: E402
from stages.tokenize.processor_check import ProcessorCheck  # noqa: E402
from tests.helpers.tiny_model import tiny_hf_dir  # noqa: E402


def compare_pictures() -> int:
    """Assert that pixels and grids are those of the reference, bit by bit; return the number of pictures."""
    jpegs = [make_image(w, h, seed=w, image_format="JPEG") for w, h in ((448, 640), (900, 701), (33, 47), (1024, 300))]
    cases = [*((case.data, case.config) for case in pixel_cases()), *((data, image_config()) for data in jpegs)]
    for data, config in cases:
        patches, grid = encode_image(data, config)
        expected, expected_grid = reference_pixels(data, config)
        assert grid.tolist() == expected_grid.tolist()
        assert np.array_equal(pixel_values(patches, config.patch_format), expected)
    return len(cases)


def compare_samples() -> int:
    """Assert that the check of what tokenize writes asks the reference too, and sees one bit; return the samples."""
    config, chat = load_image_config(ModelDirectory(tiny_hf_dir())), ChatEncoder(ModelDirectory(tiny_hf_dir()))
    check = ProcessorCheck(config, chat)
    assert check.pixels_against == f"Pillow's decoding and transformers' image processor, torchvision {_VERSION}"
    refused = 0
    for number in range(8):
        sample = make_sample(number)
        encoded = [encode_image(image, config) for image in sample.images]
        grids = np.array([grid for _, grid in encoded], np.int32).reshape(-1, 3)
        patches = np.concatenate([np.zeros((0, 768), np.uint8), *(patches for patches, _ in encoded)])
        ids, mask = chat.encode(sample.messages, grids)
        stored = TokenizedSample(
            key=sample.key,
            input_ids=ids,
            loss_mask=mask,
            image_grid_thw=grids,
            is_video=np.zeros(len(grids), bool),
            patches=patches.copy(),
            later_patches=patches[:0],
        )
        check.check(sample, stored)
        if sample.images:
            stored.patches[-1, -1] ^= 1
            try:
                check.check(sample, stored)
            except AssertionError as error:
                assert "is not what transformers makes" in str(error)
                refused += 1
    return refused


if __name__ == "__main__":
    print(f"torchvision {_VERSION}: {compare_pictures()} pictures equal, {compare_samples()} changed bits seen")
