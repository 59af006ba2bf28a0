"""Pixels: bit-equal to transformers' torchvision processor by recorded digests; tests/parity compares with it
directly."""

import io
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import open_rgb
from dataset_builders.pictures.pixels import encode_image, encode_rgb, pixel_values, smart_resize
from stages.shared.chat_format.images import load_image_config, patches_png, write_pixel_limits
from stages.shared.inputs.model_directory import ModelDirectory, processor_input, read_settings
from tests.golden.record_pixels import PIXELS_JSON
from tests.helpers.pixels import NUM_IMAGES, image_config, pixel_cases, reference_digest
from tests.helpers.samples import make_image
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise(
    "Pixels have the bits of the Hugging Face processor, for over 100 images of 8 modes: in the core by "
    "recorded digests."
)


def test_recorded_digests_of_the_reference():
    recorded = json.loads(PIXELS_JSON.read_text())["digests"]
    differing = []
    for case in pixel_cases():
        patches, grid = encode_image(case.data, case.config)
        assert patches.dtype == np.uint8 and grid.dtype == np.int32 and grid.prod() == len(patches)
        if reference_digest(pixel_values(patches, case.config.patch_format), grid) != recorded[case.name]:
            differing.append(case.name)
    assert not differing and len(recorded) == NUM_IMAGES >= 100


def test_threads_do_not_change_a_bit():
    image = open_rgb(make_image(700, 500))
    one_by_one = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        one_by_one.append(encode_rgb(np.array(image), image_config())[0])
    torch.set_num_threads(before)
    assert np.array_equal(*one_by_one)


def test_patch_order_by_hand():
    """A 32 x 64 image whose pixels hold the number of their 16 x 16 patch: 2 x 2 blocks, row by row."""
    numbers = np.arange(8, dtype=np.uint8).reshape(2, 4).repeat(16, 0).repeat(16, 1)
    config = image_config().model_copy(update={"min_pixels": 1})
    patches, grid = encode_rgb(np.stack([numbers] * 3, -1), config)
    assert grid.tolist() == [1, 2, 4]
    assert patches[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert (patches == patches[:, :1]).all()


def test_pixel_values_by_hand():
    """The order is channel, frame, row, column; the frames are copies; a value is (byte - 127.5) / 127.5."""
    config = image_config()
    patches = np.random.default_rng(0).integers(0, 256, (5, 768)).astype(np.uint8)
    values = pixel_values(patches, config.patch_format)
    assert values.shape == (5, 1536) and values.dtype == np.float32
    for channel in range(3):
        plane = (patches[:, channel * 256 : (channel + 1) * 256].astype(np.float32) - 127.5) / 127.5
        for frame in range(2):
            start = (2 * channel + frame) * 256
            assert np.array_equal(values[:, start : start + 256], plane)
    assert pixel_values(patches[:0], config.patch_format).shape == (0, 1536)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (1, 1, (64, 64)),  # scaled up to the lower limit
        (64, 64, (64, 64)),
        (100, 150, (96, 160)),  # the nearest multiples
        (80, 112, (64, 128)),  # halves are rounded to even
        (1000, 1000, (320, 320)),  # down to the upper limit
        (10, 2000, (32, 928)),  # at least one block
        (2000, 10, (928, 32)),
    ],
)
def test_smart_resize(height, width, expected):
    assert smart_resize(height, width, image_config()) == expected


def test_an_aspect_over_200_is_left_out():
    config = image_config()
    assert smart_resize(1, 200, config)
    with pytest.raises(SkipSample, match="aspect"):
        smart_resize(1, 201, config)


def test_the_preview_shows_the_scaled_picture():
    config = image_config()
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3)).astype(np.uint8))
    patches, grid = encode_rgb(np.array(image), config)
    shown = Image.open(io.BytesIO(patches_png([patches], grid, config.patch_format, 160)))
    assert np.array_equal(np.asarray(shown), np.asarray(image))
    small = Image.open(io.BytesIO(patches_png([patches], grid, config.patch_format, 48)))
    assert small.size == (48, 32)


_SIZES = (
    ...,
    None,
    {"shortest_edge": 2048, "longest_edge": 65536},
    {"shortest_edge": 2048},
    {"longest_edge": 65536},
    {"min_pixels": 2048, "max_pixels": 65536},
    {"shortest_edge": 2048, "longest_edge": 65536, "max_pixels": 9216},
    {"height": 64, "width": 64},
    {"shortest_edge": 0, "longest_edge": 65536},
    {},
    224,
)


def _preprocessor(hf_dir: Path, **changes: object) -> dict[str, object]:
    """Return the settings of a directory's image processor with changes; `...` leaves a field out."""
    raw = json.loads((hf_dir / "preprocessor_config.json").read_text()) | changes
    return {key: value for key, value in raw.items() if value is not ...}


@pytest.mark.parametrize("where", ["preprocessor_config.json", "processor_config.json", "both"])
def test_pixel_limits_are_those_that_transformers_reads(tmp_path, where, monkeypatch):
    """Every combination of the old and the new names of the limits, in either file."""
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "model"))
    alone, whole = hf_dir / "preprocessor_config.json", hf_dir / "processor_config.json"
    default = dict(Qwen2VLImageProcessorPil.size)
    refused = 0
    for size, low, high in itertools.product(_SIZES, (..., None, 4096, 0), (..., None, 9216)):
        raw = _preprocessor(tiny_hf_dir(), size=size, min_pixels=low, max_pixels=high)
        if where != "processor_config.json":
            alone.write_text(json.dumps(raw))
        if where != "preprocessor_config.json":
            alone.unlink() if where != "both" and alone.exists() else None
            whole.write_text(json.dumps({"processor_class": "Qwen3VLProcessor", "image_processor": raw}))
        # transformers 5.17 writes the limits of a file without size into the class
        monkeypatch.setattr(Qwen2VLImageProcessorPil, "size", dict(default))
        try:
            edges = Qwen2VLImageProcessorPil.from_pretrained(hf_dir).size
            expected = (edges.shortest_edge, edges.longest_edge)
        except (ValueError, TypeError):
            expected = (None, None)
        if all(expected):  # otherwise transformers refuses the first image
            config = load_image_config(ModelDirectory(hf_dir))
            assert (config.min_pixels, config.max_pixels) == expected, raw
            write_pixel_limits(hf_dir, None, 2 * expected[1])
            config = load_image_config(ModelDirectory(hf_dir))
            assert (config.min_pixels, config.max_pixels) == (expected[0], 2 * expected[1]), raw
            (settings, *_) = read_settings(hf_dir, "image_processor").values()
            assert Qwen2VLImageProcessorPil(**settings).size.longest_edge == 2 * expected[1]
        else:
            refused += 1
            with pytest.raises(InputError, match="size has no shortest_edge and longest_edge"):
                load_image_config(ModelDirectory(hf_dir))
    assert 20 < refused < 100


def test_files_that_disagree_about_pixels_are_refused_until_one_is_deleted(tmp_path):
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "model"))
    whole = hf_dir / "processor_config.json"
    whole.write_text(json.dumps({"image_processor": _preprocessor(hf_dir, max_pixels=9216)}))
    line = r"processor_config\.json: image_processor differs from preproc.* \(max_pixels: 9216 -> 65536\), and programs"
    with pytest.raises(InputError, match=line):
        load_image_config(ModelDirectory(hf_dir))
    assert load_image_config(ModelDirectory(hf_dir), max_pixels=4096).max_pixels == 4096
    digest = processor_input(ModelDirectory(hf_dir)).digest
    whole.unlink()
    assert (
        load_image_config(ModelDirectory(hf_dir)).max_pixels == 256 * 256
        and processor_input(ModelDirectory(hf_dir)).digest == digest
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": {}}, "no shortest_edge"),
        ({"merge_size": None}, "no merge_size"),
        ({"patch_size": 14}, "vision_config.patch_size of config.json is 16"),
        ({"resample": 2}, "resample is 2"),
        ({"do_normalize": False}, "do_normalize is False"),
        ({"rescale_factor": 1.0}, "rescale_factor is 1.0"),
        ({"image_processor_type": "CLIPImageProcessor"}, "'CLIPImageProcessor'; supported"),
        ({"size": {"shortest_edge": 9999, "longest_edge": 99}}, "min_pixels=9999 is more than max_pixels=99"),
        ({"merge_size": 0}, "merge_size is 0 (Input should be greater than 0)"),
        ({"patch_size": -16}, "patch_size is -16"),
        ({"temporal_patch_size": "two"}, "temporal_patch_size is two"),
        ({"image_mean": [0.5]}, "image_mean is [0.5]"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std is [0.5, 0.0, 0.5]"),
        ({"rescale_factor": "1/255"}, "rescale_factor is '1/255'"),
        ({"size": {"shortest_edge": "a", "longest_edge": 99}}, "min_pixels is a"),
        ({"size": [1, 2]}, "size has no shortest_edge"),
    ],
)
def test_what_this_pixel_path_cannot_do_is_refused(tmp_path, changes, words):
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "model"))
    file = hf_dir / "preprocessor_config.json"
    raw = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    with pytest.raises(InputError) as caught:
        load_image_config(ModelDirectory(hf_dir))
    assert words in str(caught.value) and "\n" not in str(caught.value)
