"""The interface of an engine: a loaded model with one method to prepare questions and one to answer them."""

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dataset_builders.contracts.sample import Message, SkipSample
from dataset_builders.errors import InputError
from stages.answer.config import EngineName
from stages.encode.prompt import PromptFormat

ENGINES: dict[str, str] = {
    "transformers": "stages.answer.transformers_engine:TransformersEngine",
    "vllm": "stages.answer.vllm_engine:VllmEngine",
}


@dataclass(frozen=True, slots=True)
class Request:
    """A question in the form of the data.

    Attributes:
        number: the caller's number, which is returned with the answer.
        messages: the messages before the answer; the last one is a user's.
        images: the encoded images that the messages show, in order.
        max_new_tokens: the answer is cut after this number of tokens.
    """

    number: int
    messages: tuple[Message, ...]
    images: tuple[bytes, ...]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A generated answer.

    Attributes:
        text: the answer without special tokens.
        stopped: whether an end-of-turn token was generated within max_new_tokens.
        ids: the generated tokens, without the end-of-turn token.
    """

    text: str
    stopped: bool
    ids: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Questions that the model reads together, ready for the engine.

    Attributes:
        ready: the questions in the engine's own form; None if none of them can be asked.
        skipped: number of each question that cannot be asked -> the reason.
    """

    ready: Any
    skipped: dict[int, SkipSample] = field(default_factory=dict)


class Engine(Protocol):
    """A loaded model. Several threads may call `prepare` while one runs `answer`.

    `answer` yields (number, answer) for every question that is ready, in any order.
    """

    def prepare(self, requests: Sequence[Request]) -> Prepared: ...
    def answer(self, groups: Iterable[Prepared]) -> Iterator[tuple[int, Answer]]: ...


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of an engine.

    Attributes:
        hf_dir: a model directory that `check_hf_dir` has accepted.
        prompt: the form of the prompts.
        batch_size, batch_tokens: the maximal number of answers in a batch, and of their tokens together.
        device: number of the GPU on this host; None: the first one, or the CPU if there is no GPU.
        adapter_dir: a PEFT directory with an adapter for the model; None: no adapter.
    """

    hf_dir: Path
    prompt: PromptFormat
    batch_size: int
    batch_tokens: int
    device: int | None = None
    adapter_dir: Path | None = None


def make_engine(name: EngineName, settings: EngineSettings) -> Engine:
    """Return the engine of this name, with its model loaded.

    Raises:
        InputError: the directory is not a complete model, or the engine is not installed.
    """
    module, attribute = ENGINES[name].split(":")
    return getattr(importlib.import_module(module), attribute)(settings)


def check_engine(name: EngineName, adapter_dir: Path | None = None) -> None:
    """Check, before work starts, that an engine's library is installed and supports the adapter, if there is one.

    Raises:
        InputError: the library is not installed, or the engine does not support adapters.
    """
    if adapter_dir is not None and name != "transformers":
        raise InputError(
            f"engine={name} cannot use the unmerged adapter {adapter_dir}; take engine=transformers, or "
            "the merged model of an export"
        )
    if importlib.util.find_spec(name) is None:
        raise InputError(
            f"evaluate.engine is {name!r}, which is not installed here; install {name}, or use engine=transformers"
        )
