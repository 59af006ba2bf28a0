"""answer, videos: a video is asked about as it was tokenized, and answered as transformers answers."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

import stages.answer.stage as answer_stage
from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, Sample, Video
from dataset_builders.errors import InputError
from dataset_builders.videos.decode import read_frames
from stages.answer.ask import ask
from stages.answer.config import AnswerConfig
from stages.answer.engine import EngineSettings, Request
from stages.answer.heldout import ANSWERS_JSONL
from stages.answer.stage import STAGE
from stages.answer.transformers_engine import Generator, TransformersEngine
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.chat_format.config import VideoFormat
from stages.shared.chat_format.images import load_video_config
from stages.shared.chat_format.prompt import read_prompt_format
from stages.shared.chat_format.video_reference import VideoReference
from stages.shared.inputs.model_directory import ModelDirectory, model_input
from tests.helpers.clips import numbered_clip, numbered_pngs
from tests.helpers.evaluation import picture, talkative_hf_dir
from tests.helpers.samples import make_samples_artifact, turns

pytestmark = pytest.mark.promise("Held-out videos are asked about as they were trained on, in transformers' engine.")
NEW_TOKENS = 8
# 96 x 64 pixels stay as they are.
PLAIN = VideoFormat(min_pixels=1, max_pixels=10**9)
QUESTION = [Message(role="user", text=f"Look: {VIDEO_SLOT}. What moves?")]


@pytest.fixture(scope="module")
def model():
    return ModelDirectory(talkative_hf_dir())


@pytest.fixture(scope="module")
def prompt_format(model):
    return read_prompt_format(model).model_copy(update={"videos": load_video_config(model, PLAIN)})


@pytest.fixture(scope="module")
def generator(model, prompt_format):
    return Generator(model, prompt=prompt_format)


def _by_transformers(generator: Generator, video: Video) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt and of the answer, by transformers' processor, one row for the whole video."""
    directory, config = generator._chat.model, generator._video_config
    reference = VideoReference(directory, config)
    (plan,) = generator.encode_videos([video]).plans
    read = reference.read(video, plan)
    content = [{"type": "text", "text": "Look: "}, {"type": "video"}, {"type": "text", "text": ". What moves?"}]
    tokenizer = AutoTokenizer.from_pretrained(directory.path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(reference.expanded(text, [read.text]), return_tensors="pt")["input_ids"]
    planes = torch.from_numpy(read_frames(video, read.indices)).permute(0, 3, 1, 2)[None]
    values, *grid = Qwen3VLVideoProcessor().patchify((planes / 255 - 0.5) / 0.5, 16, 2, 2)
    transformers_model = generator.decoder.model
    types = 2 * (ids == transformers_model.config.video_token_id).int()
    out = transformers_model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=types,
        pixel_values_videos=values[0],
        video_grid_thw=torch.tensor([grid]),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
    )
    return ids[0].tolist(), out[0, ids.shape[1] :].tolist()


def test_a_batch_of_videos_images_and_texts_says_what_transformers_says_to_each(generator, monkeypatch):
    monkeypatch.setattr(generator.decoder, "end_ids", frozenset())
    videos = [
        Video(data=numbered_clip(50)),
        Video(data=numbered_clip(75, 30), start=0.5, end=2.0),
        Video(frames=numbered_pngs(3), timestamps=(0.0, 0.7, 2.0)),
    ]
    prompts = [
        generator.encode_prompt(QUESTION, generator.encode_images([]), generator.encode_videos([video]))
        for video in videos
    ]
    expected = [_by_transformers(generator, video) for video in videos]
    assert [prompt.input_ids.tolist() for prompt in prompts] == [ids for ids, _ in expected]
    image = generator.encode_images([picture(1)])
    others = [
        generator.encode_prompt([Message(role="user", text=f"{IMAGE_SLOT}Which?")], image),
        generator.encode_prompt([Message(role="user", text="Which?")], generator.encode_images([])),
    ]
    alone = [generator.generate([prompt], NEW_TOKENS)[0].ids for prompt in others]
    answers = [answer.ids for answer in generator.generate([*prompts[:2], *others, prompts[2]], NEW_TOKENS)]
    assert [*answers[:2], answers[4]] == [answer for _, answer in expected] and answers[2:4] == alone
    assert len({tuple(ids) for ids in answers}) == len(answers), "equal answers would prove nothing"


def test_a_video_that_cannot_be_read_is_left_out_and_the_others_are_answered(model, prompt_format):
    engine = TransformersEngine(EngineSettings(model, prompt_format, batch_size=4, batch_tokens=4096))
    good, bad = Video(data=numbered_clip(5)), Video(data=b"no video")
    requests = [Request(n, tuple(QUESTION), (), 2, (video,)) for n, video in enumerate((good, bad))]
    prepared = engine.prepare(requests)
    assert {number: skip.reason for number, skip in prepared.skipped.items()} == {1: "decode_error"}
    assert [number for number, _ in engine.answer([prepared])] == [0]


def _asked(root, config: AnswerConfig):
    """Return the answers of the stage to one held-out sample with two questions about videos."""
    messages = turns(f"{VIDEO_SLOT}What moves?", "seven", f"{VIDEO_SLOT}And here?", "left")
    videos = (Video(data=numbered_clip(50)), Video(frames=numbered_pngs(3), timestamps=(0.0, 0.7, 2.0)))
    sample = Sample(key="clips/00000000", messages=messages, images=(), videos=videos)
    samples = make_samples_artifact(root / "samples", {"heldout/shard-00000.tar": [sample]})
    inputs = {"hf": model_input(ModelDirectory(talkative_hf_dir())), "samples": samples}
    return run_stage(STAGE, config, inputs, root).artifact


def test_the_stage_asks_each_turn_with_the_videos_before_it(tmp_path):
    made = _asked(tmp_path, AnswerConfig(max_new_tokens=3))
    lines = [json.loads(line) for line in (made.dir / ANSWERS_JSONL).read_text().splitlines()]
    assert [(line["turn"], len(line["ids"]) > 0) for line in lines] == [(0, True), (1, True)]
    assert made.manifest.stats["prompt"]["videos"]["fps"] == 2


def test_vllm_is_not_asked_about_videos_and_says_so_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(answer_stage, "check_engine", lambda name, adapter: None)
    with pytest.raises(InputError, match=r"clips/00000000 has a video, and engine=vllm .*; use engine=transformers"):
        _asked(tmp_path, AnswerConfig(max_new_tokens=3, engine="vllm"))


def test_pixels_of_both_frames_are_those_of_the_processor(generator):
    first, later = (np.random.default_rng(n).integers(0, 256, (6, 768), np.uint8) for n in (0, 1))
    values = generator.decoder.pixel_values(torch.from_numpy(first), torch.from_numpy(later)).reshape(6, 3, 2, 256)
    for place, patches in enumerate((first, later)):
        alone = generator.decoder.pixel_values(torch.from_numpy(patches)).reshape(6, 3, 2, 256)
        assert torch.equal(values[:, :, place], alone[:, :, 0])


@pytest.mark.promise(
    "`athanor ask` and the page of `athanor chat` give the answer that the evaluation scores; the page opens only with "
    "its password."
)
def test_a_video_is_asked_as_the_stage_asks_it(tmp_path, model):
    clip = numbered_clip(50)
    (tmp_path / "clip.MP4").write_bytes(clip)
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "cut.mp4").write_bytes(clip[:-200])
    generator = Generator(model)
    message = Message(role="user", text=f"{VIDEO_SLOT}What moves?")
    prompt = generator.encode_prompt(
        [message], generator.encode_images([]), generator.encode_videos([Video(data=clip)])
    )
    wanted = generator.generate([prompt], 9)[0].text.strip()
    assert ask(model.path, tmp_path / "clip.MP4", "What moves?", max_new_tokens=9) == wanted
    assert ask(model.path, None, "What moves?", max_new_tokens=9) != wanted
    with pytest.raises(InputError, match=r"empty\.mp4 cannot be used \(empty"):
        ask(model.path, tmp_path / "empty.mp4", "What moves?")
    with pytest.raises(InputError, match=r"cut\.mp4 cannot be used \(truncated_image"):
        ask(model.path, tmp_path / "cut.mp4", "What moves?")
