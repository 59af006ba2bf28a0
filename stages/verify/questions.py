"""The drawn held-out questions, as another program gets them: messages and PNG files, with our own answers.

questions/questions.json    what `loaders.py` reads
questions/00000-0.png       the first picture of question 0, decoded, upright, on white
questions/00000.npy         (P, 3 * patch_size^2) uint8: our patches of all pictures of question 0
"""

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, Sample
from dataset_builders.pictures.images import open_rgb
from dataset_builders.pictures.pixels import encode_image
from dataset_builders.storage.files import write_json
from stages.answer.heldout import GeneratedAnswer, heldout_samples
from stages.shared.artifacts.artifact import Artifact
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.prompt import PromptFormat
from stages.verify.config import VerifyConfig

QUESTIONS = "questions"
END = -1  # stands for any token that ends an answer
_SPARE = 4  # drawn per question, since not every sample is a single question


def draw(answers: Iterable[GeneratedAnswer], count: int) -> list[GeneratedAnswer]:
    """Return `count` first answers of samples, from each subset in turn, in an order fixed by their keys."""
    subsets: dict[str, list[GeneratedAnswer]] = defaultdict(list)
    for answer in sorted((a for a in answers if a.turn == 0), key=lambda a: _order(a.key)):
        subsets[answer.key.rpartition("/")[0]].append(answer)
    rounds = max(map(len, subsets.values()), default=0)
    in_turn = [subset[i] for i in range(rounds) for _, subset in sorted(subsets.items()) if i < len(subset)]
    return in_turn[:count]


def _order(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def write_questions(
    work: Path,
    config: VerifyConfig,
    samples: Artifact,
    answers: Sequence[GeneratedAnswer],
    chat: ChatEncoder,
    prompt: PromptFormat,
) -> list[dict[str, Any]]:
    """Write the questions to a directory, and return them. `chat` is the encoder of the export; its prompts are the
    expected ones."""
    drawn = {answer.key: answer for answer in draw(answers, _SPARE * config.num_questions)}
    samples_of = {sample.key: sample for sample in heldout_samples(samples) if sample.key in drawn}
    usable = [samples_of[key] for key in drawn if _is_single(samples_of[key])][: config.num_questions]
    directory = work / QUESTIONS
    directory.mkdir(exist_ok=True)
    questions = [
        _write(directory, number, each, drawn[each.key], config.max_new_tokens, chat, prompt)
        for number, each in enumerate(usable)
    ]
    about = {"questions": questions, "limit": config.max_new_tokens, "end": END}
    write_json(
        directory / "questions.json", about | {"patch_format": prompt.pixels.patch_format.model_dump(mode="json")}
    )
    return questions


def _is_single(sample: Sample) -> bool:
    """Whether a sample begins with one question, with or without a system message."""
    roles = [message.role for message in sample.messages]
    return roles[roles[0] == "system" :][:2] == ["user", "assistant"]


def _write(
    directory: Path,
    number: int,
    sample: Sample,
    answer: GeneratedAnswer,
    limit: int,
    chat: ChatEncoder,
    prompt: PromptFormat,
) -> dict[str, Any]:
    before = sample.messages[: 1 + (sample.messages[0].role == "system")]
    text, system = before[-1].text, before[0].text if len(before) == 2 else ""
    images = sample.images[: text.count(IMAGE_SLOT)]
    encoded = [encode_image(image, prompt.pixels) for image in images]
    grids = np.array([grid for _, grid in encoded], np.int32).reshape(-1, 3)
    files = [f"{number:05d}-{place}.png" for place in range(len(images))]
    for file, image in zip(files, images):
        out = io.BytesIO()
        open_rgb(image).save(out, "PNG")
        (directory / file).write_bytes(out.getvalue())
    if images:
        np.save(directory / f"{number:05d}.npy", np.concatenate([patches for patches, _ in encoded]))
    ids = ([*answer.ids, END] if answer.stopped else answer.ids)[:limit]
    return {
        "key": sample.key,
        "question": text,
        "system": system or prompt.system_prompt or "",
        "images": files,
        "patches": f"{number:05d}.npy" if images else "",
        "grids": grids.tolist(),
        "prompt_ids": chat.encode_prompt(before, grids).tolist(),
        "ids": ids,
        "text": chat.tokenizer.decode(
            [i for i in ids if i != END], skip_special_tokens=True, clean_up_tokenization_spaces=False
        ),
    }
