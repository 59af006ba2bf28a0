"""Settings of videos for tests."""

from typing import Any

from dataset_builders.contracts.tokenized import PatchFormat
from dataset_builders.videos.sampling import VideoConfig
from tests.helpers.pixels import HALF


def video_config(**changed: Any) -> VideoConfig:
    """Return transformers' defaults of Qwen3VLVideoProcessor with changes."""
    defaults = {
        "fps": 2,
        "min_frames": 4,
        "max_frames": 768,
        "min_pixels": 128 * 32 * 32,
        "max_pixels": 768 * 32 * 32,
        "cap_pixels_per_frame": False,
        "max_video_tokens": 768,
        "patch_format": PatchFormat(
            patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=HALF, image_std=HALF
        ),
    }
    return VideoConfig(**defaults | changed)
