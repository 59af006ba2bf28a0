"""An export keeps how its training read videos, and its prompts about them are those of transformers."""

from pathlib import Path

import pytest

from dataset_builders.contracts.sample import VIDEO_SLOT, Sample, Video
from dataset_builders.videos import sampling
from stages.answer.heldout import GeneratedAnswer
from stages.export.stage import copy_processor_files
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import VideoFormat
from stages.shared.chat_format.images import load_video_config
from stages.shared.chat_format.prompt import read_prompt_format
from stages.shared.inputs.model_directory import ModelDirectory
from stages.verify.directory import differences
from stages.verify.stage import video_faults, write_questions
from tests.helpers.clips import numbered_clip
from tests.helpers.evaluation import samples_artifact, talkative_hf_dir
from tests.helpers.samples import turns
from tests.stages.verify.test_verify import CONFIG

pytestmark = pytest.mark.promise("The export's check compares a video's prompt with transformers, token by token.")


@pytest.fixture
def export(tmp_path) -> ModelDirectory:
    """Return the export of a training with other settings of videos than its base."""
    base = ModelDirectory(talkative_hf_dir())
    settings = VideoFormat(fps=5, min_frames=3, max_frames=9, max_pixels=40_000, cap_pixels_per_frame=True)
    trained = load_video_config(base, settings)
    hf_dir = tmp_path / "hf"
    hf_dir.mkdir()
    for file in base.path.glob("*.safetensors"):
        (hf_dir / file.name).symlink_to(file)
    copy_processor_files(base.path, hf_dir, {"videos": trained.model_dump(mode="json"), "video_prompt": "0" * 64})
    assert load_video_config(ModelDirectory(hf_dir)) == trained != load_video_config(base)
    assert differences(hf_dir, base) == []
    return ModelDirectory(hf_dir)


def _faults(model: ModelDirectory, tmp_path: Path) -> list[str]:
    video = Video(data=numbered_clip(50), start=0.4)
    sample = Sample(key="clips/00000000", messages=turns(f"{VIDEO_SLOT}What moves?", "b"), images=(), videos=(video,))
    samples = samples_artifact(tmp_path / "samples", [sample])
    said = [GeneratedAnswer(key=sample.key, turn=0, answer="b", stopped=True, ids=[5])]
    chat, prompt = ChatEncoder(model), read_prompt_format(model)
    assert write_questions(tmp_path, CONFIG, samples, said, chat, prompt) == [], "other programs are not asked"
    return video_faults(model, samples, said, chat, prompt)


def test_the_prompt_is_the_one_that_transformers_makes_with_the_exports_files(export, tmp_path):
    assert _faults(export, tmp_path) == []


def test_another_prompt_than_that_of_transformers_is_a_fault_that_says_where(export, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "group_times", lambda times: [*times[::2]])
    (fault,) = _faults(export, tmp_path)
    assert fault.startswith("clips/00000000: its prompt about a video has ") and "transformers 5." in fault
