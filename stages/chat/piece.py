"""Settings of an answer, and the pieces in which it comes."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """The settings of one answer.

    Attributes:
        max_tokens: the answer is cut after this number of tokens, including the end-of-turn token.
        stop: texts that end the answer.
        temperature: 0: the most probable token each time, as in the answers that are scored.
        top_p, seed: see `Drawing`; they have no effect at temperature 0.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer.

    Attributes:
        reason: stop: the model or a stop text ended the answer; length: max_tokens did.
        prompt_tokens, completion_tokens: numbers of tokens, the image tokens and the end-of-turn token included.
    """

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that follows the earlier pieces.

    Attributes:
        ending: set in the last piece only.
        error: why no further text comes; the piece is then the last one and has no ending.
    """

    text: str = ""
    ending: Ending | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        return self.ending is not None or self.error is not None
