"""The settings of a model's video processor, as transformers reads them, and what a recipe changes of them."""

import json
import shutil
from pathlib import Path

import pytest
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from dataset_builders.errors import InputError
from stages.shared.chat_format.config import VideoFormat
from stages.shared.chat_format.images import embedded_video_config, load_video_config, write_video_config
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.tokenize.config import TokenizeConfig
from tests.helpers.tiny_model import FIRST, tiny_hf_dir
from tests.helpers.tiny_text_model import text_hf_dir

pytestmark = pytest.mark.promise(
    "Frames of a video are chosen, scaled and timed as transformers' processor does, for constant rates exactly."
)
FILE = "video_preprocessor_config.json"
LIMITS = ("fps", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens")


def _with(tmp_path: Path, **changes: object) -> ModelDirectory:
    """Return the tiny model with changed settings of videos; `...` leaves one out."""
    hf_dir = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "hf"))
    raw = json.loads((hf_dir / FILE).read_text()) | changes
    (hf_dir / FILE).write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
    return ModelDirectory(hf_dir)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"size": ...},
        {"fps": None, "min_frames": None},
        {"fps": 1.5, "max_frames": 32, "cap_pixels_per_frame": True, "max_video_tokens": 128},
        {"patch_size": ..., "merge_size": ..., "image_mean": ..., "image_std": ...},
    ],
)
def test_the_settings_are_those_that_transformers_reads(tmp_path, changes):
    model = _with(tmp_path, **changes)
    config, theirs = load_video_config(model), Qwen3VLVideoProcessor.from_pretrained(model.path)
    assert (config.min_pixels, config.max_pixels) == (theirs.size.shortest_edge, theirs.size.longest_edge)
    wanted = {name: getattr(theirs, name) for name in LIMITS if changes.get(name, ...) is not None}
    assert {name: getattr(config, name) or None for name in wanted} == {n: v or None for n, v in wanted.items()}


def test_a_recipe_changes_settings_and_an_export_writes_them(tmp_path):
    model = _with(tmp_path)
    settings = VideoFormat(fps=0.5, max_frames=8, min_pixels=2048, max_pixels=9216, cap_pixels_per_frame=True)
    changed = load_video_config(model, settings)
    assert changed.model_dump(include=set(VideoFormat.model_fields) - {"min_frames"}) == settings.model_dump(
        exclude={"min_frames"}
    )
    write_video_config(model.path, changed)
    assert load_video_config(ModelDirectory(model.path)) == changed
    theirs = Qwen3VLVideoProcessor.from_pretrained(model.path)
    assert (theirs.fps, theirs.max_frames, theirs.size.longest_edge) == (0.5, 8, 9216)


def test_a_model_that_a_stage_makes_has_the_settings_that_were_told_before():
    settings = VideoFormat(fps=3)
    assert embedded_video_config(FIRST, settings) == load_video_config(ModelDirectory(tiny_hf_dir()), settings)
    assert load_video_config(ModelDirectory(text_hf_dir())) is None


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"video_processor_type": "Qwen2VLVideoProcessor"}, {}, "'Qwen2VLVideoProcessor'; supported: Qwen3VL"),
        ({"num_frames": 16}, {}, "num_frames is 16; only fps"),
        ({"size": {"height": 64, "width": 64}}, {}, "size has no shortest_edge and longest_edge alone"),
        ({"image_mean": [0.4, 0.5, 0.5]}, {}, "frames are cut otherwise than images (image_mean"),
        ({"temporal_patch_size": 4}, {}, "temporal_patch_size is 4, but vision_config.temporal_patch_size"),
        ({"fps": 0}, {}, "fps is 0 (Input should be greater than 0)"),
        ({"do_resize": False}, {}, "do_resize is False"),
        ({}, {"min_frames": 9, "max_frames": 4}, "tokenize.videos: min_frames=9 is more than max_frames=4"),
        ({}, {"max_pixels": 512}, "tokenize.videos: min_pixels=1024 is more than max_pixels=512"),
    ],
)
def test_what_frames_cannot_be_read_by_is_one_line(tmp_path, changes, settings, words):
    model = _with(tmp_path, **changes)
    with pytest.raises(InputError) as caught:
        load_video_config(model, VideoFormat(**settings))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_two_files_that_disagree_are_refused(tmp_path):
    model = _with(tmp_path)
    raw = json.loads((model.path / FILE).read_text()) | {"fps": 7}
    (model.path / "processor_config.json").write_text(json.dumps({"video_processor": raw}))
    with pytest.raises(InputError, match=r"video_processor differs from video_preproc.* \(fps: 7.0 -> 2.0\)"):
        load_video_config(ModelDirectory(model.path))


def test_settings_of_videos_and_the_decoder_are_in_the_fingerprint(tmp_path, monkeypatch):
    before = processor_input(ModelDirectory(tiny_hf_dir())).digest
    assert processor_input(_with(tmp_path, fps=7)).digest != before
    monkeypatch.setattr("stages.shared.inputs.model_directory.decoder", lambda: "pyav 0 / libavcodec 0")
    assert processor_input(ModelDirectory(tiny_hf_dir())).digest != before
    known = TokenizeConfig(max_seq_len=1, max_pixels=None, max_skip_fraction=0)
    assert "videos" not in known.model_dump()  # earlier fingerprints stay
    changed = known.model_copy(update={"videos": VideoFormat(cap_pixels_per_frame=False)})
    assert changed.model_dump()["videos"]["cap_pixels_per_frame"] is False
