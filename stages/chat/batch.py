"""The answers of one model to many users: one thread generates them side by side in one pool.

A question that comes enters the running batch as soon as there is room, one before each step, and an answer leaves it
when it ends. Each prompt is read alone, so that a prompt that cannot be read fails alone. If a step fails, each answer
is read again by itself, with what was generated of it, and only those that fail again end with the error.
"""

import collections
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import tokenizers

from stages.answer.greedy_decoder import Pool, PoolLimits, Prompt, Row
from stages.answer.transformers_engine import Generator
from stages.chat.drawing import Drawing
from stages.chat.piece import AnswerSettings, Ending, Piece
from stages.chat.text_stream import TextStream

_log = logging.getLogger("athanor.chat")


@dataclass(slots=True, eq=False)
class Asked:
    """A question in the batch, or on its way there.

    Attributes:
        row: the answer so far.
        text: the text of the answer so far.
        listener: called in the batch's thread with each piece.
        sent: number of tokens that were given to `text`.
    """

    prompt: Prompt
    row: Row
    text: TextStream
    listener: Callable[[Piece], None]
    sent: int = 0

    @property
    def most_tokens(self) -> int:
        """The number of tokens of the prompt and of the longest possible answer."""
        return len(self.prompt.input_ids) + self.row.limit

    def drop(self) -> None:
        """Generate no more of the answer: nobody waits for it. Any thread may call this."""
        self.row.dropped = True


class Batch:
    """A thread that answers questions until `close`.

    Args:
        limits: the maximal number of answers side by side, and of the tokens that they may reach together.
    """

    def __init__(self, generator: Generator, limits: PoolLimits) -> None:
        self._decoder, self._limits = generator.decoder, limits
        self._tokenizer = tokenizers.Tokenizer.from_str(generator.tokenizer.to_str())  # this thread's own
        self._waiting: collections.deque[Asked] = collections.deque()
        self._running: list[Asked] = []
        self._numbers = itertools.count()
        self._wake, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._work, name="athanor-batch", daemon=True)
        self._thread.start()

    def ask(self, prompt: Prompt, settings: AnswerSettings, listener: Callable[[Piece], None]) -> Asked:
        """Put a question into the queue. Any thread may call this."""
        draw = Drawing(settings.temperature, settings.top_p, settings.seed) if settings.temperature else None
        row = Row(next(self._numbers), settings.max_tokens, draw=draw)
        asked = Asked(prompt, row, TextStream(self._tokenizer, settings.stop), listener)
        with self._wake:
            self._waiting.append(asked)
            self._wake.notify()
        return asked

    def close(self) -> None:
        """End the thread after its step. Answers that have not ended get no further piece."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _work(self) -> None:
        pool = Pool(self._decoder)
        while self._has_work(pool):
            try:
                pool = self._turn(pool)
            except Exception as error:  # the batch itself cannot go on, as when memory ends while rows are joined
                pool = Pool(self._decoder)
                for asked in self._running:
                    if not asked.row.ended:
                        self._fail(asked, error)
            self._deliver()

    def _has_work(self, pool: Pool) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: pool.rows or self._waiting or self._closed)
            return not self._closed

    def _turn(self, pool: Pool) -> Pool:
        """Admit one question, or none, and generate one token for each row; return the pool."""
        if (asked := self._next()) is not None:
            self._running.append(asked)
            if (new := self._read(asked)) is not None:
                pool.take_out()
                pool.join(new)
        if pool.is_sparse:
            pool.take_out()
        try:
            if pool.rows:
                pool.step()
            return pool
        except Exception:  # whatever a library raises; the answers that do not cause it go on
            _log.exception("a step of %d answers failed; each is read again alone", len(pool.rows))
            return self._read_again()

    def _next(self) -> Asked | None:
        """Remove and return the first question of the queue; None if there is none or no room for it."""
        with self._wake:
            while self._waiting and self._waiting[0].row.dropped:
                self._waiting.popleft()
            if not self._waiting:
                return None
            running = [asked for asked in self._running if not asked.row.ended]
            sizes = [asked.most_tokens for asked in (self._waiting[0], *running)]
            has_room = len(sizes) <= self._limits.rows and len(sizes) * max(sizes) <= self._limits.tokens
            return self._waiting.popleft() if has_room or not running else None

    def _read(self, asked: Asked) -> Pool | None:
        """Return a pool with this answer only, one token longer; None if that fails."""
        new = Pool(self._decoder)
        ids = np.concatenate([asked.prompt.input_ids, np.array(asked.row.ids, np.int32)])
        try:
            new.admit(self._decoder.pad([replace(asked.prompt, input_ids=ids)], [asked.row]))
            return new
        except Exception as error:  # whatever a library raises ends this answer only
            self._fail(asked, error)
            return None

    def _read_again(self) -> Pool:
        pool = Pool(self._decoder)
        for asked in self._running:
            if not asked.row.ended and (new := self._read(asked)) is not None:
                pool.join(new)
        return pool

    def _fail(self, asked: Asked, error: Exception) -> None:
        _log.error("an answer failed", exc_info=error)
        asked.drop()
        asked.listener(Piece(error=error))

    def _deliver(self) -> None:
        """Give each listener its new text, and forget the answers that have ended."""
        for asked in self._running:
            try:
                if not asked.row.dropped:
                    self._give(asked)
            except Exception as error:  # whatever the tokenizer raises ends this answer only
                self._fail(asked, error)
        self._running = [asked for asked in self._running if not asked.row.ended]

    def _give(self, asked: Asked) -> None:
        row = asked.row
        text = asked.text.push(row.ids[asked.sent :])
        asked.sent = len(row.ids)
        ending = None
        if asked.text.is_stopped or row.ended:
            text += asked.text.finish()
            reason = "stop" if row.stopped or asked.text.is_stopped else "length"
            ending = Ending(reason, len(asked.prompt.input_ids), len(row.ids) + row.stopped)
            asked.drop()
        if text or ending:
            asked.listener(Piece(text, ending))
