"""Compare pixels with transformers' torchvision processor itself: `python -m tests.parity.compare_pixels`.

A process of its own, because other tests must not find torchvision: tests/parity/test_pixels.py starts it.
"""

import numpy as np

from dataset_builders.contracts.sample import VIDEO_SLOT, Message, Sample, Video
from dataset_builders.contracts.tokenized import PixelStore, TokenizedSample
from dataset_builders.pictures.pixels import encode_image, pixel_values
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.clips import NTSC, numbered_clip
from tests.helpers.pixels import image_config, pixel_cases
from tests.helpers.samples import make_image, make_sample
from tests.helpers.torchvision_reference import reference_pixels, torchvision_version

_VERSION = torchvision_version()  # mended where it does not load by itself, before transformers' models import it

from stages.shared.chat_format.chat import ChatEncoder  # noqa: E402
from stages.shared.chat_format.config import VideoFormat  # noqa: E402
from stages.shared.chat_format.images import load_image_config, load_video_config  # noqa: E402
from stages.tokenize.config import TokenizeConfig  # noqa: E402
from stages.tokenize.processor_check import ProcessorCheck  # noqa: E402
from stages.tokenize.shard import tokenize_sample  # noqa: E402
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


def compare_videos() -> tuple[int, int]:
    """Assert that ids, grids and pixels of videos are those of the reference, bit by bit, and that a changed bit is
    seen; return the number of videos and of seen bits."""
    model = ModelDirectory(tiny_hf_dir())
    chat, pixels = ChatEncoder(model), PixelStore(codec="u8", config=load_image_config(model))
    clips = [numbered_clip(count, rate) for count, rate in ((1, 25), (2, 25), (5, 24), (50, NTSC), (90, 30), (121, 60))]
    videos = [Video(data=clip) for clip in [*clips, numbered_clip(40, turned=90), numbered_clip(30, codec="mpeg4")]]
    videos += [
        Video(frames=tuple(make_image(*size, seed=n) for n in range(count)), timestamps=tuple(np.arange(count) / 3))
        for count, size in ((2, (70, 45)), (5, (131, 240)), (8, (64, 96)))
    ]
    limits = (VideoFormat(), VideoFormat(max_pixels=20_000, fps=5), VideoFormat(min_pixels=10**6, min_frames=6))
    compared = refused = 0
    for number, video in enumerate(videos):
        messages = (Message(role="user", text=f"Look: {VIDEO_SLOT}."), Message(role="assistant", text="seven"))
        sample = Sample(key=f"clips/{number:08d}", messages=messages, images=(), videos=(video,))
        for limit in (*limits, VideoFormat(cap_pixels_per_frame=True, fps=1)):
            config = load_video_config(model, limit)
            (text,) = chat.tokenize([messages])
            settings = TokenizeConfig(max_seq_len=10**6, max_pixels=None, max_skip_fraction=0.0, videos=limit)
            _, stored, plans = tokenize_sample(sample, text, chat, pixels, settings, config)
            check = ProcessorCheck(pixels.config, chat, config)
            check.check(sample, stored, plans)
            compared += 1
            stored.later_patches[-1, -1] ^= 1
            try:
                check.check(sample, stored, plans)
            except AssertionError as error:
                assert "is not what transformers makes" in str(error)
                refused += 1
    return compared, refused


if __name__ == "__main__":
    print(
        f"torchvision {_VERSION}: {compare_pictures()} pictures equal, {compare_samples()} changed bits seen; "
        "{} videos equal, {} changed bits seen".format(*compare_videos())
    )
