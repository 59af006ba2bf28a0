"""An answer's text while its tokens come: whole characters only, and nothing of a stop text."""

from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one answer.

    Args:
        tokenizer: used by one thread at a time.
        stops: texts that end the answer; the answer does not contain them.

    Attributes:
        is_stopped: whether a stop text was generated.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._decoding = DecodeStream(skip_special_tokens=True)
        self._text, self._ids, self._sent = "", [], 0
        self.is_stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Return the further text that certainly belongs to the answer, after these further tokens."""
        for token in () if self.is_stopped else ids:
            self._ids.append(token)
            self._text += self._decoding.step(self._tokenizer, token) or ""
        self._cut()
        return self._send(len(self._text) - (0 if self.is_stopped else self._possible_stop()))

    def finish(self) -> str:
        """Return the rest of the text; no further token follows."""
        if not self.is_stopped:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
            self._text += whole[len(self._text) :]  # bytes that are no whole character
            self._cut()
        return self._send(len(self._text))

    def _cut(self) -> None:
        """End the text before the first stop text."""
        places = [place for stop in self._stops if (place := self._text.find(stop, self._sent)) >= 0]
        if places and not self.is_stopped:
            self._text, self.is_stopped = self._text[: min(places)], True

    def _possible_stop(self) -> int:
        """Return the length of the longest end of the text with which a stop text begins."""
        lengths = (n for stop in self._stops for n in range(1, len(stop)) if self._text.endswith(stop[:n]))
        return max(lengths, default=0)

    def _send(self, end: int) -> str:
        piece, self._sent = self._text[self._sent : end], max(self._sent, end)
        return piece
