"""The frames of a video, their size and their times: transformers' own formulas, asked here directly."""

import io
import itertools

import av
import numpy as np
import pytest
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

from dataset_builders.contracts.sample import SkipSample, Video
from dataset_builders.videos.decode import probe
from dataset_builders.videos.sampling import choose_frames, constant_rate, group_times, resized_frame
from tests.helpers.clips import NTSC, numbered_clip
from tests.helpers.videos import video_config

pytestmark = pytest.mark.promise(
    "Frames of a video are chosen, scaled and timed as transformers' processor does, for constant rates exactly."
)
RATES = (24000 / 1001, 24.0, 25.0, 30000 / 1001, 30.0, 60000 / 1001, 60.0, 12.5, 15.0, 1.0, 0.5)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 15, 29, 30, 31, 59, 60, 61, 100, 299, 300, 301, 1499, 1500, 5000, 24_000)


def _theirs(total: int, rate: float, **settings: float) -> np.ndarray:
    processor = Qwen3VLVideoProcessor(**settings)
    return processor.sample_frames(VideoMetadata(total_num_frames=total, fps=rate), fps=processor.fps)


@pytest.mark.parametrize("tick", [None, 1e-3, 1 / 90_000])
def test_constant_rates_give_the_indices_and_times_of_transformers(tick):
    settings = ({}, {"fps": 1}, {"fps": 4.0, "max_frames": 64}, {"fps": 0.7, "min_frames": 1}, {"fps": 30})
    for rate, total, changed in itertools.product(RATES, LENGTHS, settings):
        times = np.arange(total) / rate
        times = times if tick is None else np.round(times / tick) * tick
        chosen = choose_frames(times.tolist(), video_config(**changed))
        expected = _theirs(total, rate, **changed)
        assert chosen.tolist() == expected.tolist(), (rate, total, changed)
        # 30 and 29.97 frames a second are one in a second of milliseconds.
        found = constant_rate(times.tolist()) if total > 60 else rate
        assert found == rate
        ours = group_times([index / found for index in chosen])
        assert ours == Qwen3VLProcessor._calculate_timestamps(None, expected, rate), (rate, total, changed)


@pytest.mark.parametrize("kind", [{}, {"codec": "mpeg4", "container": "avi"}, {"container": "mpegts"}, {"bf": "2"}])
@pytest.mark.parametrize("rate", [24, 25, NTSC, 30, 60])
def test_the_rate_of_a_file_is_the_one_that_transformers_reads(rate, kind):
    data = numbered_clip(90, rate, **kind)
    with av.open(io.BytesIO(data)) as file:
        theirs = float(file.streams.video[0].average_rate)  # transformers.video_utils.read_video_pyav
    assert constant_rate(probe(Video(data=data), decode=False).times) == theirs == float(rate)


def test_a_variable_rate_gives_the_frames_on_show_at_even_times():
    """Ten frames in the first second, then one a second: frames by number would show the first second alone."""
    times = [*np.arange(10) / 10, *range(1, 11)]
    assert constant_rate(times) is None
    # At 0, 2.5, 5, 7.5 and 10 s; half a frame a second in 20 frames of 1.9 a second.
    chosen = choose_frames(times, video_config(fps=0.5))
    assert [times[index] for index in chosen] == [0, 2, 5, 7, 10]
    # Two a second: 20 frames in half a second each, of which some are on show twice and are read once.
    chosen = choose_frames(times, video_config(max_frames=19))
    assert chosen.tolist() == sorted(set(chosen.tolist())) and times[chosen[-1]] == 10


def test_times_of_groups_by_hand():
    assert group_times([0.0, 0.5, 1.0]) == [0.25, 1.0]  # the odd frame is its own second one
    assert group_times([3.0]) == [3.0]
    assert group_times([0.2, 0.4]) == [pytest.approx(0.3)]


@pytest.mark.parametrize("cap", [False, True])
def test_sizes_are_those_of_transformers(cap):
    sizes = (1, 20, 31, 32, 33, 48, 80, 224, 360, 479, 720, 1080, 2000)
    limits = ({}, {"min_pixels": 4096, "max_pixels": 768 * 32**3}, {"min_pixels": 64, "max_pixels": 5000})
    compared = 0
    for height, width, frames, limit in itertools.product(sizes, sizes, (2, 3, 4, 5, 7, 16, 63, 768), limits):
        config = video_config(cap_pixels_per_frame=cap, **limit)
        most = config.max_pixels
        if cap:  # as in `Qwen3VLVideoProcessor.resize`
            most = frames * max(min(768 * 32**2, most // frames), int(config.min_pixels * 1.05))
        try:
            expected = smart_resize(frames, height, width, 2, 32, config.min_pixels, most)
        except ValueError:
            with pytest.raises(SkipSample, match="aspect"):
                resized_frame(frames, height, width, config)
            continue
        assert resized_frame(frames, height, width, config) == expected
        compared += 1
        if not cap and min(height, width) > 16:
            asked = Qwen3VLVideoProcessor(size={"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels})
            patches = asked.get_num_of_video_patches(frames, height, width)
            assert patches == -(-frames // 2) * expected[0] * expected[1] // 16**2
    assert compared > 3000


def test_a_single_frame_which_transformers_refuses_is_read_twice():
    with pytest.raises(ValueError, match="must be larger than temporal_factor"):
        smart_resize(1, 64, 64)
    config = video_config()
    assert resized_frame(1, 300, 400, config) == resized_frame(2, 300, 400, config)
