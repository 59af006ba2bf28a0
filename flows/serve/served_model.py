"""A model that answers requests, by transformers in this process."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from dataset_builders.contracts.sample import SkipSample
from flows.serve.api_error import field_error
from flows.serve.chat_request import Chat, unusable
from stages.answer.greedy_decoder import PoolLimits
from stages.answer.transformers_engine import Generator
from stages.chat.batch import Batch
from stages.chat.conversation import prompt_of
from stages.chat.piece import Piece

_LETTERS = 32  # of a token, at most in the mean of a text: a longer text is refused before it costs memory
_PREPARING = 4  # conversations whose images are decoded at a time: bounds the memory of large images


class ServedModel(Protocol):
    """A model under the name by which requests call it.

    `answer` yields pieces, the last of which has an ending or an error; closing it frees the answer's place in the
    batch. It raises ApiError before the first piece for a conversation that cannot be asked.
    """

    name: str

    def answer(self, chat: Chat) -> AsyncIterator[Piece]: ...
    def close(self) -> None: ...


class LocalModel:
    """A model in this process.

    Args:
        context: the limit of a prompt and its answer together, in tokens; the model's own may be lower.

    Raises:
        InputError: the directory is not a complete model, or the adapter is for another model.
    """

    def __init__(
        self, name: str, hf_dir: Path, adapter_dir: Path | None, limits: PoolLimits, context: int = sys.maxsize
    ) -> None:
        self.name, self._context = name, context
        self._generator = Generator(hf_dir, adapter_dir=adapter_dir)
        self._batch = Batch(self._generator, limits)
        self._preparing = ThreadPoolExecutor(_PREPARING, "athanor-prepare")

    async def answer(self, chat: Chat) -> AsyncIterator[Piece]:
        """Yield the answer's pieces. See `ServedModel`."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()
        most = _LETTERS * min(self._context, self._generator.context_length)
        if (letters := sum(len(message.text) for message in chat.messages)) > most:
            what = f"the prompt has {letters} characters, and this server takes {most}"
            raise field_error("messages", what, "context_length_exceeded")
        try:
            prompt = await loop.run_in_executor(self._preparing, prompt_of, self._generator, chat.messages, chat.images)
        except SkipSample as error:
            raise unusable(error, chat) from error
        size = check_context(chat, len(prompt.input_ids), self._generator.context_length, self._context)

        def listen(piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        asked = self._batch.ask(prompt, replace(chat.settings, max_tokens=size), listen)
        try:
            while not (piece := await pieces.get()).is_last:
                yield piece
            yield piece
        finally:
            asked.drop()

    def close(self) -> None:
        """End the threads."""
        self._preparing.shutdown(wait=False, cancel_futures=True)
        self._batch.close()


def check_context(chat: Chat, prompt_tokens: int, context: int, limit: int) -> int:
    """Return the number of tokens that the answer may have.

    Args:
        context: tokens that the model can read.
        limit: tokens that this server lets it read.

    Raises:
        ApiError: prompt and answer are longer than one of the two.
    """
    room = min(context, limit) - prompt_tokens
    if room < (chat.max_tokens or 1):
        end = f"the model's context has {context}"
        if limit < context:
            end = f"this server takes {limit} together (athanor serve --context)"
        raise field_error(
            "messages",
            f"the prompt has {prompt_tokens} tokens and the answer may have {chat.max_tokens or 1}, but {end}",
            "context_length_exceeded",
        )
    return min(room, chat.settings.max_tokens)
