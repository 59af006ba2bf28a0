"""The interface of an engine: a loaded model with one method to prepare questions and one to answer them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Protocol

from dataset_builders.contracts.sample import Message, SkipSample, Video
from dataset_builders.errors import InputError
from stages.answer.config import EngineName
from stages.shared.chat_format.prompt import PromptFormat
from stages.shared.inputs.adapter_directory import AdapterDirectory
from stages.shared.inputs.model_directory import ModelDirectory
from stages.shared.inputs.served import unservable_adapter
from stages.shared.launchers.vllm import check_vllm

ENGINES: dict[str, str] = {
    "transformers": "stages.answer.transformers_engine:TransformersEngine",
    "vllm": "stages.answer.vllm_engine:VllmEngine",
}


@dataclass(frozen=True, slots=True)
class Request:
    """A question in the form of the data."""

    number: int  # the caller's, which is returned with the answer
    messages: tuple[Message, ...]  # before the answer; the last one is a user's
    images: tuple[bytes, ...]  # the encoded images that the messages show, in order
    max_new_tokens: int  # the answer is cut after this number of tokens
    videos: tuple[Video, ...] = ()  # that the messages show, in order


@dataclass(frozen=True, slots=True)
class Answer:
    """A generated answer."""

    text: str  # without special tokens
    stopped: bool  # whether an end-of-turn token was generated within max_new_tokens
    ids: list[int]  # the generated tokens, without the end-of-turn token

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Questions that the model reads together, ready for the engine."""

    ready: Any  # the questions in the engine's own form; None if none of them can be asked
    skipped: dict[int, SkipSample] = field(default_factory=dict)  # number of a question that cannot be asked -> reason


class Engine(Protocol):
    """A loaded model. Several threads may call `prepare` while one runs `answer`.

    `answer` yields (number, answer) for every question that is ready, in any order.
    """

    def prepare(self, requests: Sequence[Request]) -> Prepared: ...
    def answer(self, groups: Iterable[Prepared]) -> Iterator[tuple[int, Answer]]: ...


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of an engine."""

    model: ModelDirectory
    prompt: PromptFormat
    batch_size: int  # answers in a batch, at most
    batch_tokens: int  # their tokens together, at most
    device: int | None = None  # number of the GPU on this host; None: the first one, or the CPU if there is no GPU
    adapter: AdapterDirectory | None = None  # an adapter of this model; None: no adapter
    longest: int | None = None  # tokens of the longest prompt with its answer; None: as many as the model has positions


def make_engine(name: EngineName, settings: EngineSettings) -> Engine:
    """Return the engine of this name, with its model loaded."""
    return resolve_name(ENGINES[name])(settings)


def check_engine(name: EngineName, adapter: AdapterDirectory | None = None) -> None:
    """Check, before work starts, that an engine's library is there and supports the adapter, if there is one."""
    if name == "vllm":
        check_vllm()
        if adapter is not None and (refused := unservable_adapter(adapter.config, adapter.tensors)):
            raise InputError(f"{adapter.path}: {refused}; take engine=transformers, or the merged model of an export")
