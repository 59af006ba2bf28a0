"""tokenize, videos: the frames, times, ids, grids and patches of clips of every rate, beside images and text."""

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, Sample, Video
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.tokenized import TokenizedSample, read_pixel_store
from dataset_builders.errors import InputError
from dataset_builders.records.pixel_codecs import decode_sample
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import VideoFormat
from stages.shared.chat_format.images import load_video_config
from stages.shared.chat_format.video_reference import VideoReference
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.tokenize import processor_check
from stages.tokenize import shard as tokenize_shard
from stages.tokenize.stage import STAGE, TokenizeConfig
from tests.helpers.clips import HEIGHT, NTSC, WIDTH, number_of, numbered_clip, numbered_pngs
from tests.helpers.index import read_index
from tests.helpers.samples import make_image, make_samples_artifact, turns
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise(
    "A video's prompt, grids and patches are those of transformers' processor; its times are those of its frames."
)
# 96 x 64 pixels stay as they are: multiples of 32, and within these limits at any number of frames.
PLAIN = VideoFormat(fps=2, min_pixels=1, max_pixels=10**9)
CONFIG = TokenizeConfig(max_seq_len=4096, max_pixels=None, max_skip_fraction=0.0, videos=PLAIN)


def sample_of(number: int, *videos: Video, question: str | None = None, images: Sequence[bytes] = ()) -> Sample:
    text = question or VIDEO_SLOT * len(videos) + "What moves?"
    messages = (Message(role="user", text=text), Message(role="assistant", text="seven"))
    return Sample(key=f"clips/{number:08d}", messages=messages, images=tuple(images), videos=videos)


def tokenize(samples: Sequence[Sample], root: Path, hf_dir: Path | None = None, **changes: object) -> Artifact:
    artifact = make_samples_artifact(Path(tempfile.mkdtemp(dir=root)), {"train/shard-00000.tar": samples})
    inputs = {"samples": artifact, "processor": processor_input(ModelDirectory(hf_dir or tiny_hf_dir()))}
    return run_stage(STAGE, CONFIG.model_copy(update=changes), inputs, root, None).artifact


def read(tokenized: Artifact) -> list[TokenizedSample]:
    pixels = read_pixel_store(tokenized.dir, tokenized.manifest.stats)
    rows = read_index(tokenized.dir).to_pylist()
    fields = [read_record(tokenized.dir / row["shard"], row["offset"], row["size"]) for row in rows]
    return [decode_sample(row["key"], each, pixels) for row, each in zip(rows, fields)]


def numbers_in(sample: TokenizedSample) -> list[tuple[int, int]]:
    """Return the numbers that the two frames of each group carry."""

    def number(patches: np.ndarray, grid: np.ndarray) -> int:
        rows, columns = (int(side) // 2 for side in grid[1:])
        blocks = patches.reshape(rows, columns, 2, 2, 3, 16, 16).transpose(0, 2, 5, 1, 3, 6, 4)
        return number_of(blocks.reshape(HEIGHT, WIDTH, 3))

    groups = [visual for visual, is_video in zip(sample.visuals(), sample.is_video) if is_video]
    return [(number(group.patches, group.grid), number(group.later_patches, group.grid)) for group in groups]


def text_of(sample: TokenizedSample) -> str:
    chat = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    return chat.decode(sample.input_ids)


def group_text(*times: float, tokens: int = 6) -> str:
    groups = [f"<{t:.1f} seconds><|vision_start|>{'<|video_pad|>' * tokens}<|vision_end|>" for t in times]
    return f"<|vision_start|>{''.join(groups)}<|vision_end|>"


CLIPS = {
    "25": (Video(data=numbered_clip(50)), [(0, 16), (33, 49)], (0.32, 1.64)),
    "24": (Video(data=numbered_clip(48, 24)), [(0, 16), (31, 47)], (16 / 48, 78 / 48)),
    "29.97": (Video(data=numbered_clip(90, NTSC)), None, None),
    "30": (Video(data=numbered_clip(60, 30, codec="libvpx-vp9", container="webm")), None, None),
    "60": (Video(data=numbered_clip(150, 60, audio=True)), None, None),
    "mpeg4": (Video(data=numbered_clip(40, 10, codec="mpeg4", container="avi")), None, None),
    "turned": (Video(data=numbered_clip(50, turned=90)), [(0, 16), (33, 49)], (0.32, 1.64)),
    **{str(n): (Video(data=numbered_clip(n)), None, None) for n in range(1, 6)},
}


def test_each_time_names_the_frames_that_were_encoded(tmp_path):
    """Every clip whole: two frames of a group are those at its time, and an odd one is its own second."""
    stored = read(tokenize([sample_of(n, video) for n, (video, *_) in enumerate(CLIPS.values())], tmp_path))
    rates = {"24": 24.0, "29.97": float(NTSC), "30": 30.0, "60": 60.0, "mpeg4": 10.0}
    for sample, (name, (_, numbers, times)) in zip(stored, CLIPS.items(), strict=True):
        found = numbers_in(sample)
        expected = [(a + b) / 2 / rates.get(name, 25.0) for a, b in found]
        assert text_of(sample).count(group_text(*expected)) == 1, (name, found, text_of(sample))
        assert numbers is None or (found, expected) == (numbers, pytest.approx(times))
        assert found[0][0] == 0 and [*sum(found, ())] == sorted(sum(found, ())), (name, found)


def test_what_is_not_whole_keeps_its_times_in_the_file(tmp_path):
    whole = numbered_clip(250)
    videos = [
        Video(data=whole, start=2.0, end=4.0),
        Video(frames=numbered_pngs(3, first=7), timestamps=(1.0, 2.5, 4.0)),
        Video(data=numbered_clip(8, times=(0, 0.1, 0.2, 0.3, 5, 6, 7, 8))),
        Video(frames=numbered_pngs(8), timestamps=tuple(np.arange(8) / 8)),
    ]
    clip, listed, uneven, dense = read(tokenize([sample_of(n, video) for n, video in enumerate(videos)], tmp_path))
    assert numbers_in(clip) == [(50, 67), (83, 100)] and group_text(2.34, 3.66) in text_of(clip)
    assert numbers_in(listed) == [(7, 8), (9, 9)] and group_text(1.75, 4.0) in text_of(listed)
    # Eight frames in 8 s: all of them.
    assert group_text(0.05, 0.25, 5.5, 7.5) in text_of(uneven)
    # Eight a second were chosen before, and are not chosen again at two a second.
    assert numbers_in(dense) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert group_text(0.0625, 0.3125, 0.5625, 0.8125) in text_of(dense)


@pytest.mark.parametrize("shape", ["hybrid", "listed", "shared"])
def test_the_other_families_read_the_same(tmp_path, shape):
    hf_dir = hybrid_hf_dir() if shape == "hybrid" else experts_hf_dir(shape)
    made = tokenize([sample_of(0, Video(data=numbered_clip(50)))], tmp_path, hf_dir)
    (stored,) = read(made)
    assert made.manifest.stats["checked"]["samples"] == 1 and numbers_in(stored) == [(0, 16), (33, 49)]


def two_turns() -> Sample:
    messages = turns(f"{VIDEO_SLOT}What moves?", "seven", f"{VIDEO_SLOT}And{IMAGE_SLOT}here?", "one")
    videos = (Video(frames=numbered_pngs(2), timestamps=(0.0, 0.5)), Video(data=numbered_clip(250)))
    return Sample(key="clips/00000000", messages=messages, images=(make_image(64, 64),), videos=videos)


def test_videos_go_with_the_turns_that_do_not_fit(tmp_path):
    whole = tokenize([two_turns()], tmp_path)
    (row,) = read_index(whole.dir).to_pylist()
    limit = row["num_tokens"] - 1
    shortened = tokenize([two_turns(), sample_of(1)], tmp_path, max_seq_len=limit, over_length="drop_turns")
    first, _ = read(shortened)
    assert numbers_in(first) == [(0, 1)] and first.is_video.tolist() == [True]
    assert text_of(first).count("seconds>") == 1 and shortened.manifest.stats["num_videos"] == 1
    assert shortened.manifest.stats["num_shortened"] == 1 and whole.manifest.stats["num_videos"] == 2


def test_a_sample_that_is_too_long_is_left_out_before_a_frame_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_shard, "iter_frames", lambda *_: pytest.fail("decoded"))
    tokenized = tokenize([two_turns(), sample_of(1)], tmp_path, max_seq_len=40, max_skip_fraction=1.0)
    assert tokenized.manifest.skips == {"over_length": 1}


def test_the_settings_and_the_form_of_the_prompt_are_in_the_stats(tmp_path):
    made = tokenize([sample_of(0, Video(data=numbered_clip(5)))], tmp_path)
    model = ModelDirectory(tiny_hf_dir())
    assert made.manifest.stats["videos"] == load_video_config(model, PLAIN).model_dump(mode="json")
    assert made.manifest.stats["video_prompt"] == ChatEncoder(model).video_prompt_digest()
    assert tokenize([sample_of(1)], tmp_path).manifest.stats["videos"] is None


def test_a_video_for_a_model_without_settings_of_videos_is_one_line(tmp_path):
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "hf"))
    (hf_dir / "video_preprocessor_config.json").unlink()
    artifact = make_samples_artifact(
        tmp_path / "samples", {"train/shard-00000.tar": [sample_of(0, Video(data=numbered_clip(5)))]}
    )
    inputs = {"samples": artifact, "processor": processor_input(ModelDirectory(hf_dir))}
    with pytest.raises(InputError, match=r"hf has no video_preprocessor_config.json .*; copy the model's"):
        run_stage(STAGE, CONFIG, inputs, tmp_path, None)


@pytest.mark.parametrize("codec", ["u8", "u8_zstd", "original"])
def test_videos_and_images_in_one_conversation_in_their_order(tmp_path, codec):
    image, second = make_image(64, 64, seed=1), make_image(32, 96, seed=2)
    videos = (Video(data=numbered_clip(50)), Video(frames=numbered_pngs(2), timestamps=(0.0, 0.5)))
    messages = (
        Message(role="user", text=f"Look: {IMAGE_SLOT} and {VIDEO_SLOT}{VIDEO_SLOT}. What moves?"),
        Message(role="assistant", text="nothing"),
        Message(role="user", text=f"{IMAGE_SLOT}And here?"),
        Message(role="assistant", text="seven"),
    )
    sample = Sample(key="clips/00000000", messages=messages, images=(image, second), videos=videos)
    (stored,) = read(tokenize([sample], tmp_path, codec=codec))
    assert stored.is_video.tolist() == [False, True, True, True, False]
    assert stored.image_grid_thw[:, 1:].tolist() == [[4, 4], *[[4, 6]] * 3, [6, 2]]
    assert numbers_in(stored) == [(0, 16), (33, 49), (0, 1)]
    text = text_of(stored)
    assert f"and {group_text(0.32, 1.64)}{group_text(0.25)}. What moves?" in text


def test_a_large_video_is_checked_frame_by_frame(tmp_path, monkeypatch):
    asked = []

    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    def pixels(self, frames, read):
        asked.append(len(frames))
        raise AssertionError("all frames at once")

    monkeypatch.setattr(processor_check, "torchvision_version", lambda: "0")
    monkeypatch.setattr(processor_check, "_image_processor", lambda *_: None)
    monkeypatch.setattr(VideoReference, "pixels", pixels)
    samples = [sample_of(0, Video(data=numbered_clip(30, 30)))]
    with pytest.raises(AssertionError, match="all frames at once"):
        tokenize(samples, folder("small"))
    monkeypatch.setattr(processor_check, "_MOST_BYTES", 2 * 3 * HEIGHT * WIDTH - 1)
    monkeypatch.setattr(tokenize_shard, "tokenize_sample", changed := Changed(tokenize_shard.tokenize_sample))
    tokenize(samples, folder("large"))
    changed.one_bit = True
    with pytest.raises(AssertionError, match="group 0 is not what PyAV decodes"):
        tokenize(samples, folder("changed"))
    assert len(asked) == 1


class Changed:
    """A function that makes a tokenized sample, of which one bit of the second frame can be changed."""

    def __init__(self, make) -> None:
        self._make, self.one_bit = make, False

    def __call__(self, *arguments):
        sample, tokenized, *rest = self._make(*arguments)
        if self.one_bit:
            later = tokenized.later_patches.copy()
            later[0, 0] ^= 1
            tokenized = dataclasses.replace(tokenized, later_patches=later)
        return sample, tokenized, *rest
