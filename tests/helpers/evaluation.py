"""Shared parts of the generation tests: a model with varied answers, images, and artifacts to evaluate on."""

import functools
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.sample import Message, Sample
from dataset_builders.storage.files import write_text
from stages.answer.heldout import ANSWERS_JSONL, Line, to_line
from stages.answer.stage import STAGE as ANSWER
from stages.answer.stage import AnswerConfig
from stages.embedded_model.stage import make_tiny_hf_dir
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.stage import STAGE as EVALUATE
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.verify import file_entries
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.config import BoxFormat
from stages.shared.chat_format.prompt import PromptFormat
from tests.helpers.drawn_pictures import encoded
from tests.helpers.pixels import image_config
from tests.helpers.process_dir import process_dir
from tests.helpers.samples import make_samples_artifact
from tests.helpers.tiny_model import FIRST, TEXTS
from tests.stages.artifacts import stage_artifact

PROMPT = PromptFormat(pixels=image_config(), system_prompt=None, boxes=BoxFormat())  # of made-up answers


@functools.cache
def talkative_hf_dir() -> Path:
    """Return a tiny model whose weights are so large that its answers differ from prompt to prompt. Copy before
    changing."""
    directory = process_dir("talkative")
    return make_tiny_hf_dir(directory / "hf", FIRST.model_copy(update={"initializer_range": 0.25}), TEXTS)


def picture(seed: int, width: int = 64, height: int = 64) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(pixels))


def conversation(key: str, turns: Sequence[tuple[str, str]], images: Sequence[bytes] = ()) -> Sample:
    """Return a sample of (question, answer) turns. The caller puts the image slots into the questions."""
    messages = []
    for question, answer in turns:
        messages += [Message(role="user", text=question), Message(role="assistant", text=answer)]
    sample = Sample(key=key, messages=tuple(messages), images=tuple(images))
    sample.check()
    return sample


def mixed_samples(count: int = 12) -> list[Sample]:
    """Return samples of four kinds in rotation (text only, one image, two images, several turns), with images and texts
    of many sizes."""
    samples = []
    for i in range(count):
        wide, high = 40 + 24 * (i % 5), 40 + 16 * (i % 7)
        key = f"{('text', 'single', 'pair', 'multi')[i % 4]}/{i:08d}"
        if i % 4 == 0:
            samples.append(conversation(key, [(f"What is three plus four{' and one' * (i // 2)}?", "seven")]))
        elif i % 4 == 1:
            samples.append(conversation(key, [("<image>Which digit?", str(i % 10))], [picture(i, wide, high)]))
        elif i % 4 == 2:
            images = [picture(i, wide, high), picture(100 + i, high, wide)]
            samples.append(conversation(key, [("<image><image>Which of the two is larger?", "The left one.")], images))
        else:
            turns = [("<image>Which digit is in the picture?", "4"), ("How many strokes?", "two"), ("Again?", "Yes.")]
            samples.append(conversation(key, turns, [picture(i, high, wide)]))
    return samples


def samples_artifact(directory: Path, heldout: Sequence[Sample], train: Sequence[Sample] = ()) -> Artifact:
    """Return a convert artifact with one shard per split."""
    shards = {"train/shard-00000.tar": train, "heldout/shard-00000.tar": heldout}
    return make_samples_artifact(directory, shards, fingerprint="c" * 16)


def hf_artifact(directory: Path, hf_dir: Path) -> Artifact:
    """Return an export artifact that holds a copy of a model directory."""
    shutil.copytree(hf_dir, directory / "hf")
    files = file_entries(directory, ("hf/*",))
    Manifest(stage="export", version=1, fingerprint="e" * 16, config={}, parents={}, files=files).write(directory)
    return Artifact.load(directory)


def answers_artifact(
    directory: Path, lines: Iterable[Line], prompt: PromptFormat = PROMPT, fingerprint: str = "a" * 16
) -> Artifact:
    """Return an answer artifact with made-up answers."""
    artifact = stage_artifact(
        directory, "answer", fingerprint=fingerprint, stats={"prompt": prompt.model_dump(mode="json")}
    )
    write_text(directory / ANSWERS_JSONL, "".join(map(to_line, lines)))
    return artifact


def answered(
    config: AnswerConfig, inputs: Mapping[str, Artifact], root: Path, resources: StageResources | None = None
) -> Artifact:
    """Return the artifact with a model's answers to the held-out samples. The inputs are "hf" and "samples"."""
    return run_stage(ANSWER, config, inputs, root, resources).artifact


def evaluated(config: EvaluateConfig, inputs: Mapping[str, Artifact], root: Path) -> Artifact:
    answers = answered(config.answer, inputs, root)
    return run_stage(EVALUATE, config, {"answers": answers, "samples": inputs["samples"]}, root).artifact
