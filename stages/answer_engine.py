"""What answers questions: a loaded model behind two calls, one that prepares and one that generates."""

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.sample import Message, SkipSample
from stages.prompt_format import PromptFormat

EngineName = Literal["transformers", "vllm"]
ENGINES: dict[str, str] = {
    "transformers": "stages.generate:TransformersEngine",
    "vllm": "stages.generate_vllm:VllmEngine",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question as it is in the data.

    Attributes:
        number: the caller's own, given back with the answer.
        messages: up to the answer; the last one is a user's.
        images: the encoded images that the messages show, in order.
        max_new_tokens: the answer is cut there.
    """

    number: int
    messages: tuple[Message, ...]
    images: tuple[bytes, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated.

    Attributes:
        text: without special tokens.
        stopped: an end-of-turn token came before max_new_tokens were used up.
        num_tokens: generated tokens without the end-of-turn token.
    """

    text: str
    stopped: bool
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """Questions that are generated from together, ready for the engine.

    Attributes:
        ready: the engine's own form of them; None where none of them can be asked.
        skipped: number of each question that cannot be asked, and why.
    """

    ready: Any
    skipped: dict[int, SkipSample] = field(default_factory=dict)


class Engine(Protocol):
    """A loaded model. `prepare` is called in several threads, beside `answer`, which runs in one.

    `answer` yields (number, answer) for every question that is ready, in any order.
    """

    def prepare(self, asked: Sequence[Asked]) -> Prepared: ...
    def answer(self, groups: Iterable[Prepared]) -> Iterator[tuple[int, Answer]]: ...


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is made of.

    Attributes:
        hf_dir: a model directory that `check_hf_dir` has seen.
        prompt: how it is asked.
        batch_size, batch_tokens: answers side by side, and tokens of theirs, at most.
        device: place of the GPU on this host; None: the first one, or the CPU where there is none.
    """

    hf_dir: Path
    prompt: PromptFormat
    batch_size: int
    batch_tokens: int
    device: int | None = None


def make_engine(name: EngineName, settings: EngineSettings) -> Engine:
    """Load the model.

    Raises:
        InputError: the directory is no complete model, or the engine is not installed.
    """
    module, attribute = ENGINES[name].split(":")
    return getattr(importlib.import_module(module), attribute)(settings)


def check_engine(name: EngineName) -> None:
    """See that an engine's library is here, before work starts.

    Raises:
        InputError: it is not.
    """
    if importlib.util.find_spec(name) is None:
        raise InputError(
            f"evaluate.engine is {name!r}, which is not installed here; install {name}, or use engine=transformers"
        )
