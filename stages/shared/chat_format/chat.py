"""The encoding of a conversation: messages -> input_ids and loss_mask.

Only answers are trained on: all or the last, but never one with is_learnt=False. With each answer, the loss mask covers
its reasoning, if it has some and the template writes it, and the end-of-turn token. Answers are found by the structure
of the model's own chat template, never by a search for their text: a span runs from the ids of the assistant header to
the next end-of-turn id. Tokens that the inference prompt has after the header (an empty think block, or the start of a
block if there is reasoning) are not trained on. An answer is trained on only if the ids before it equal its inference
prompt; `cut` makes such conversations (see `reasoning.py`). A conversation with an unexpected encoding is left out with
a reason.

Text is rendered and tokenized with one placeholder per image, many conversations in one call, and the image tokens are
inserted afterwards. The ids equal the ids of the text with every image token written out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, SkipSample
from dataset_builders.errors import InputError
from stages.shared.chat_format.config import LEARN_ALL, Learn
from stages.shared.chat_format.reasoning import Conversation, cut_conversations, mismatch, read_format
from stages.shared.chat_format.text import ChatText
from stages.shared.inputs.model_directory import ModelDirectory


@dataclass(frozen=True, eq=False, slots=True)
class TokenizedText:
    """A conversation as tokens, one placeholder per image."""

    ids: np.ndarray  # (n,) int32
    mask: np.ndarray  # (n,) uint8, 1 where the token itself is trained on


class ChatEncoder(ChatText):
    """Encoder of conversations with the tokenizer and the chat template of one model directory.

    Args:
        learn: which answers are trained on (never one with is_learnt=False), and whether with their reasoning.
        system_prompt: the first message of a conversation that has no system message of its own.
    """

    def __init__(self, model: ModelDirectory, learn: Learn = LEARN_ALL, system_prompt: str | None = None) -> None:
        super().__init__(model, learn, system_prompt)
        shape = model.shape
        self.image_token_id = shape.images.image_token_id if shape.images else -1
        self.vocab_size = shape.language.vocab_size  # rows of the embedding
        # Side of the block of patches that becomes one image token.
        self.merge_size = shape.vision.spatial_merge_size if shape.vision else 1
        for token in model.family.turn_tokens:
            if token not in self.added_tokens:
                raise InputError(f"{model.path}: the tokenizer has no {token} token; only ChatML models are supported")
        start_of_turn, self._end_of_turn = model.family.turn_tokens
        self.end_of_turn_id = self.added_tokens[self._end_of_turn]
        self._header = self.token_ids(f"{start_of_turn}assistant\n")
        token = re.search(f"{IMAGE_SLOT}|{self._forbidden.pattern}", system_prompt or "")
        if token:
            raise InputError(f"the system prompt holds {token.group()}, a token of the chat's own; leave it out")
        self._try_template(f"{start_of_turn}assistant\n")

    def encode(self, messages: Sequence[Message], grids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Encode a whole conversation; SkipSample says why it cannot be encoded, or that nothing is to be trained on.

        Args:
            messages: `IMAGE_SLOT` in a user's text marks the position of an image; answers are stripped of outer white
                space.
            grids: (images, 3) int32, (t, h, w) in patches of each image, in order of the slots.

        Returns:
            input_ids: (n,) int32, with all image tokens.
            loss_mask: (n,) uint8, 1 where the token itself is trained on.
        """
        (text,) = self.tokenize([messages])
        if isinstance(text, SkipSample):
            raise text
        return self.splice(text, _patches(grids))

    def cut(self, conversations: Sequence[Conversation]) -> list[list[Conversation]]:
        """Cut conversations so that training matches inference, each into one or more parts that start at its first
        turn. Each answer to train on is trained on in exactly one part. Most templates need no cut."""
        if self.format.is_fixed:
            return [[messages] for messages in conversations]
        trained = [trained_answers(messages, self.learn) for messages in conversations]
        reasoned = [[bool(self.reasoning_of(m)) for m in messages] for messages in conversations]
        return cut_conversations(conversations, trained, reasoned, self.render, self.format.keeps)

    def tokenize(self, conversations: Sequence[Sequence[Message]]) -> list[TokenizedText | SkipSample]:
        """Tokenize many conversations in one call; one that cannot be encoded gives its SkipSample."""
        texts: list[TokenizedText | SkipSample | None] = [None] * len(conversations)
        rendered: dict[int, str] = {}
        for i, text in enumerate(self.render(conversations)):
            if isinstance(text, SkipSample):
                texts[i] = text
            else:
                rendered[i] = text
        for i, ids in zip(rendered, self.token_ids_of(list(rendered.values()))):
            try:
                texts[i] = TokenizedText(ids, self._mask_answers(ids, conversations[i]))
            except SkipSample as skip:
                texts[i] = skip
        return texts

    def splice(self, text: TokenizedText, patches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Insert the image tokens; return input_ids and loss_mask. See `encode`. `patches` are (images,) integers: the
        number of patches of each image, before merging."""
        repeats = self._repeats(text.ids, patches)
        return np.repeat(text.ids, repeats), np.repeat(text.mask, repeats)

    def encode_prompt(self, messages: Sequence[Message], grids: np.ndarray) -> np.ndarray:
        """Return (n,) int32: the ids of the prompt for the next answer. For arguments and errors, see `encode`."""
        ids = self.token_ids(self.render_one(messages, add_generation_prompt=True))
        return np.repeat(ids, self._repeats(ids, _patches(grids)))

    def prompt_ids(self, messages: Sequence[Message], grids: np.ndarray) -> np.ndarray:
        """Return `encode_prompt` with one placeholder per image, for an engine that inserts the image tokens."""
        ids = self.token_ids(self.render_one(messages, add_generation_prompt=True))
        self._repeats(ids, _patches(grids))  # for its check alone
        return ids

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens with one placeholder per image. Raises SkipSample as `encode`."""
        return len(self.token_ids(self.render_one(messages, add_generation_prompt=False)))

    def trained_text(self, answer: Message) -> str:
        """Return the text that the trained tokens of an answer decode to."""
        return self._normalize(self.format.written(self.reasoning_of(answer), answer.text.strip())) + self._end_of_turn

    def _mask_answers(self, ids: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        answers = [message for message in messages if message.role == "assistant"]
        is_trained = trained_answers(messages, self.learn)
        if not any(is_trained):
            raise SkipSample("empty_target", f"none of {len(answers)} answers is to be trained on")
        mask = np.zeros(len(ids), np.uint8)
        starts = _starts_of(self._header, ids) + len(self._header)
        if len(starts) != len(answers):
            raise SkipSample("mask_span_mismatch", f"{len(starts)} assistant spans for {len(answers)} answers")
        ends = np.flatnonzero(ids == self.end_of_turn_id)
        for start, answer, trained in zip(starts, answers, is_trained):
            place = np.searchsorted(ends, start)
            if place == len(ends):
                raise SkipSample("mask_span_mismatch", "an answer without an end-of-turn token")
            end = int(ends[place])
            start += self._count_given(ids[start:end], answer, trained)
            mask[start : end + 1] = trained
        return mask

    def _count_given(self, turn: np.ndarray, answer: Message, is_trained: bool) -> int:
        """Return the number of ids between an answer's header and the part that the model generates. `turn` is (n,)
        int32, the ids from the end of the header to the end of the turn."""
        reasoning, text = self.reasoning_of(answer), answer.text.strip()
        given, decoded = self._given[bool(reasoning)], self.decode(turn)
        expected = self._normalize(self.format.given(reasoning) + self.format.written(reasoning, text))
        if decoded == expected and np.array_equal(turn[: len(given)], given):
            return len(given)
        # A turn that is not trained on may be written as history, without its reasoning.
        if is_trained or decoded not in (self._normalize(text), self._normalize(self.format.closed + text)):
            raise SkipSample("mask_span_mismatch", f"found {decoded[:60]!r} for the answer {text[:60]!r}")
        return 0

    def _repeats(self, ids: np.ndarray, patches: np.ndarray) -> np.ndarray:
        """Return (n,) int64: the number of the image's tokens at each image placeholder, elsewhere 1."""
        places = np.flatnonzero(ids == self.image_token_id)
        starts = np.count_nonzero(ids == self.images.vision_start_token_id) if self.images else 0
        if not len(places) == starts == len(patches):
            raise SkipSample("image_count_mismatch", f"{len(places)} placeholders in the prompt, {len(patches)} images")
        repeats = np.ones(len(ids), np.int64)
        repeats[places] = patches // self.merge_size**2
        return repeats

    def _try_template(self, header_text: str) -> None:
        """Detect how the template writes an answer's turn, and try it once."""
        question = [Message(role="user", text=f"{IMAGE_SLOT}a" if self.images else "a")]
        grid = np.array([[1, self.merge_size, self.merge_size]] if self.images else [], np.int32)
        try:
            prompts = [self.render([question], True, thinks)[0] for thinks in (False, True)]
            self.format = read_format(question[0].text, prompts, self.render, header_text, self._end_of_turn)
            # The ids of a prompt after its only assistant header: without reasoning, and with it if it can be requested
            self._given: list[np.ndarray] = []
            for prompt in prompts[: 1 + (self.format.opened is not None)]:
                if isinstance(prompt, SkipSample):
                    raise prompt
                ids = self.token_ids(prompt)
                headers = _starts_of(self._header, ids)
                if len(headers) != 1:
                    raise SkipSample("mask_span_mismatch", f"{len(headers)} assistant headers in a generation prompt")
                self._given.append(ids[headers[0] + len(self._header) :])
            self.encode_prompt(question, grid)
            self.encode([*question, Message(role="assistant", text="b")], grid)
            if why := mismatch(self):
                raise SkipSample("mask_span_mismatch", why)
        except SkipSample as error:
            raise InputError(
                f"{self.model.path}: the chat template does not write ChatML turns with one image placeholder each "
                f"({error}); only templates with this structure are supported"
            ) from error


def trained_answers(messages: Sequence[Message], learn: Learn) -> list[bool]:
    """Return, for each assistant message, whether it is trained on."""
    answers = [message for message in messages if message.role == "assistant"]
    return [m.is_learnt and (learn.answers == "all" or i == len(answers) - 1) for i, m in enumerate(answers)]


def split_turns(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """Return the turns of a conversation: a new turn begins with a user message after an answer."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message.role == "user" and any(m.role == "assistant" for m in turns[-1]):
            turns.append([])
        turns[-1].append(message)
    return [tuple(turn) for turn in turns]


def _patches(grids: np.ndarray) -> np.ndarray:
    """Return (images,) int64: the number of patches of each image, before merging."""
    return np.asarray(grids, np.int64).reshape(-1, 3).prod(-1)


def _starts_of(pattern: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the start indices of `pattern` in `ids`."""
    if len(ids) < len(pattern):
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(pattern))
    return np.flatnonzero((windows == pattern).all(-1))
