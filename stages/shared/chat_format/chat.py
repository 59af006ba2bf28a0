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
from pathlib import Path

import numpy as np
import transformers

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, SkipSample
from dataset_builders.errors import InputError, one_line
from stages.shared.chat_format.config import LEARN_ALL, Learn
from stages.shared.chat_format.reasoning import Conversation, ReasoningFormat, cut_conversations, read_format
from stages.shared.chat_format.template import REASONING, Messages, chat_template, read_template
from stages.shared.chat_format.trial import mismatch
from stages.shared.inputs.model_directory import ModelDirectory

SYSTEM_PROMPT = "system_prompt.txt"  # file of an exported directory: the system prompt that the model was trained with


@dataclass(frozen=True, eq=False, slots=True)
class TokenizedText:
    """A conversation as tokens, one placeholder per image."""

    ids: np.ndarray  # (n,) int32
    mask: np.ndarray  # (n,) uint8, 1 where the token itself is trained on


def learnt_answers(messages: Sequence[Message], learn: Learn) -> list[bool]:
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


def read_system_prompt(hf_dir: Path) -> str | None:
    """Return the system prompt that an exported directory was trained with, or None."""
    file = hf_dir / SYSTEM_PROMPT
    return file.read_text(encoding="utf-8") if file.is_file() else None


class ChatEncoder:
    """Encoder of conversations with the tokenizer and the chat template of one model directory.

    Args:
        learn: which answers are trained on (never one with is_learnt=False), and whether with their reasoning.
        system_prompt: the first message of a conversation that has no system message of its own.
    """

    def __init__(self, model: ModelDirectory, learn: Learn = LEARN_ALL, system_prompt: str | None = None) -> None:
        family, shape = model.family, model.shape
        self.model = model
        self.learn, self.system_prompt = learn, system_prompt
        self.tokenizer = load_tokenizer(model.path)
        self.template = chat_template(model, self.tokenizer.chat_template, self.tokenizer.special_tokens_map)
        self.images = shape.images  # ids that mark the images of a prompt; None for a text-only model
        self.image_token_id = shape.images.image_token_id if shape.images else -1
        self.vocab_size = shape.language.vocab_size  # rows of the embedding
        # Side of the block of patches that becomes one image token.
        self.merge_size = shape.vision.spatial_merge_size if shape.vision else 1
        added = self.tokenizer.get_added_vocab()
        for token in family.turn_tokens:
            if token not in added:
                raise InputError(f"{model.path}: the tokenizer has no {token} token; only ChatML models are supported")
        start_of_turn, self._end_of_turn = family.turn_tokens
        self.end_of_turn_id = added[self._end_of_turn]
        self._forbidden = re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)))
        self._header_text = f"{start_of_turn}assistant\n"
        self._header = self.token_ids(self._header_text)
        token = re.search(f"{IMAGE_SLOT}|{self._forbidden.pattern}", system_prompt or "")
        if token:
            raise InputError(f"the system prompt holds {token.group()}, a token of the chat's own; leave it out")
        self._try_template(model.path)

    def reasoning_of(self, message: Message) -> str:
        """Return the reasoning that the template is given before a message; empty if reasoning is not trained on."""
        if not message.reasoning or self.format.opened is None or not self.learn.reasoning:
            return ""
        return message.reasoning.strip()

    def cut(self, conversations: Sequence[Conversation]) -> list[list[Conversation]]:
        """Cut conversations so that training matches inference, each into one or more parts that start at its first
        turn. Each answer to train on is trained on in exactly one part. Most templates need no cut."""
        if self.format.is_fixed:
            return [[messages] for messages in conversations]
        learnt = [learnt_answers(messages, self.learn) for messages in conversations]
        reasoned = [[bool(self.reasoning_of(m)) for m in messages] for messages in conversations]
        return cut_conversations(conversations, learnt, reasoned, self.render, self.format.keeps)

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

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens with one placeholder per image. Raises SkipSample as `encode`."""
        return len(self.token_ids(self._render(messages, add_generation_prompt=False)))

    def tokenize(self, conversations: Sequence[Sequence[Message]]) -> list[TokenizedText | SkipSample]:
        """Tokenize many conversations in one call; one that cannot be encoded gives its SkipSample."""
        texts: list[TokenizedText | SkipSample | None] = [None] * len(conversations)
        rendered: dict[int, str] = {}
        for i, text in enumerate(self.render(conversations)):
            if isinstance(text, SkipSample):
                texts[i] = text
            else:
                rendered[i] = text
        for i, ids in zip(rendered, self._tokenize_all(list(rendered.values()))):
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
        ids = self._prompt(messages)
        return np.repeat(ids, self._repeats(ids, _patches(grids)))

    def prompt_ids(self, messages: Sequence[Message], grids: np.ndarray) -> np.ndarray:
        """Return `encode_prompt` with one placeholder per image, for an engine that inserts the image tokens."""
        ids = self._prompt(messages)
        self._repeats(ids, _patches(grids))  # for its check alone
        return ids

    def _prompt(self, messages: Sequence[Message]) -> np.ndarray:
        return self.token_ids(self._render(messages, add_generation_prompt=True))

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        (text,) = self.render([messages], add_generation_prompt)
        if isinstance(text, SkipSample):
            raise text
        return text

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        add_generation_prompt: bool = False,
        thinks: bool | None = None,
    ) -> list[str | SkipSample]:
        """Return the text of each conversation, or the reason why there is none. See `ChatTemplate.render`."""
        sound: list[Messages] = []
        skips: list[SkipSample | None] = []
        for messages in conversations:
            try:
                sound.append(self._turns(messages))
                skips.append(None)
            except SkipSample as skip:
                skips.append(skip)
        texts = iter(self.template.render(sound, add_generation_prompt, thinks))
        return [skip or next(texts) for skip in skips]

    def _turns(self, messages: Sequence[Message]) -> Messages:
        if self.system_prompt and not any(message.role == "system" for message in messages):
            messages = [Message(role="system", text=self.system_prompt), *messages]
        turns = [{"role": message.role, "content": self._content(message)} for message in messages]
        if self.format.opened is not None:
            for turn, message in zip(turns, messages):
                turn |= {REASONING: reasoning} if (reasoning := self.reasoning_of(message)) else {}
        return turns

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        token = self._forbidden.search(message.text)
        if message.reasoning:
            token = token or self._forbidden.search(message.reasoning)
        if token:
            raise SkipSample("special_token_in_text", f"{token.group()} in a {message.role} turn")
        if message.role != "user":
            if IMAGE_SLOT in message.text or IMAGE_SLOT in message.reasoning:
                raise SkipSample("special_token_in_text", f"{IMAGE_SLOT} in a {message.role} turn")
            # A newline at the start of an answer would be merged with the header's newline into one token.
            return message.text.strip() if message.role == "assistant" else message.text
        if IMAGE_SLOT not in message.text:
            return message.text
        if self.images is None:
            raise SkipSample("image_count_mismatch", "an image for a text-only model")
        content: list[dict[str, str]] = []
        for i, text in enumerate(message.text.split(IMAGE_SLOT)):
            content += [{"type": "image"}] if i else []
            content += [{"type": "text", "text": text}] if text else []
        return content

    def token_ids(self, text: str) -> np.ndarray:
        """Return (n,) int32: the ids of a text."""
        return self._tokenize_all([text])[0]

    def _tokenize_all(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        return [np.array(ids, np.int32) for ids in encoded["input_ids"]]

    def _mask_answers(self, ids: np.ndarray, messages: Sequence[Message]) -> np.ndarray:
        answers = [message for message in messages if message.role == "assistant"]
        is_learnt = learnt_answers(messages, self.learn)
        if not any(is_learnt):
            raise SkipSample("empty_target", f"none of {len(answers)} answers is to be trained on")
        mask = np.zeros(len(ids), np.uint8)
        starts = _starts_of(self._header, ids) + len(self._header)
        if len(starts) != len(answers):
            raise SkipSample("mask_span_mismatch", f"{len(starts)} assistant spans for {len(answers)} answers")
        ends = np.flatnonzero(ids == self.end_of_turn_id)
        for start, answer, learnt in zip(starts, answers, is_learnt):
            place = np.searchsorted(ends, start)
            if place == len(ends):
                raise SkipSample("mask_span_mismatch", "an answer without an end-of-turn token")
            end = int(ends[place])
            start += self._count_given(ids[start:end], answer, learnt)
            mask[start : end + 1] = learnt
        return mask

    def _count_given(self, turn: np.ndarray, answer: Message, is_learnt: bool) -> int:
        """Return the number of ids between an answer's header and the part that the model generates. `turn` is (n,)
        int32, the ids from the end of the header to the end of the turn."""
        reasoning, text = self.reasoning_of(answer), answer.text.strip()
        given, decoded = self._given[bool(reasoning)], self.decode(turn)
        expected = self._normalize(self.format.given(reasoning) + self.format.written(reasoning, text))
        if decoded == expected and np.array_equal(turn[: len(given)], given):
            return len(given)
        # A turn that is not trained on may be written as history, without its reasoning.
        if is_learnt or decoded not in (self._normalize(text), self._normalize(self.format.closed + text)):
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

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids, including special tokens."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def learnt_text(self, answer: Message) -> str:
        """Return the text that the trained tokens of an answer decode to."""
        return self._normalize(self.format.written(self.reasoning_of(answer), answer.text.strip())) + self._end_of_turn

    def _normalize(self, text: str) -> str:
        # A tokenizer may normalize a text first (NFC for Qwen), and the ids then decode to the normalized text.
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def _try_template(self, hf_dir: Path) -> None:
        """Detect how the template writes an answer's turn, and try it once."""
        question = [Message(role="user", text=f"{IMAGE_SLOT}a" if self.images else "a")]
        grid = np.array([[1, self.merge_size, self.merge_size]] if self.images else [], np.int32)
        self.format = ReasoningFormat(opened="")  # so that the template is given the reasoning
        try:
            prompts = [self.render([question], True, thinks)[0] for thinks in (False, True)]
            self.format = read_format(question[0].text, prompts, self.render, self._header_text, self._end_of_turn)
            self._given = [self._after_header(prompt) for prompt in prompts[: 1 + (self.format.opened is not None)]]
            self.encode_prompt(question, grid)
            self.encode([*question, Message(role="assistant", text="b")], grid)
            if why := mismatch(self):
                raise SkipSample("mask_span_mismatch", why)
        except SkipSample as error:
            raise InputError(
                f"{hf_dir}: the chat template does not write ChatML turns with one image placeholder each ({error}); "
                "only templates with this structure are supported"
            ) from error

    def _after_header(self, prompt: str | SkipSample) -> np.ndarray:
        """Return (n,) int32: the ids of a prompt after its only assistant header."""
        if isinstance(prompt, SkipSample):
            raise prompt
        ids = self.token_ids(prompt)
        headers = _starts_of(self._header, ids)
        if len(headers) != 1:
            raise SkipSample("mask_span_mismatch", f"{len(headers)} assistant headers in a generation prompt")
        return ids[headers[0] + len(self._header) :]


def load_tokenizer(hf_dir: Path) -> "transformers.PreTrainedTokenizerBase":
    """Return the directory's tokenizer with its chat template."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(hf_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise a dozen kinds of errors, including bare Exception
        why = one_line(error) or type(error).__name__
        raise InputError(f"{hf_dir}: the tokenizer cannot be loaded ({why}); copy the model's own files") from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template, _ = read_template(hf_dir)
    if not isinstance(tokenizer.chat_template, str):
        raise InputError(
            f"{hf_dir} has no chat template (chat_template.jinja); take an -Instruct model or copy its file"
        )
    return tokenizer


def _patches(grids: np.ndarray) -> np.ndarray:
    """Return (images,) int64: the number of patches of each image, before merging."""
    return np.asarray(grids, np.int64).reshape(-1, 3).prod(-1)


def _starts_of(pattern: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the start indices of `pattern` in `ids`."""
    if len(ids) < len(pattern):
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(pattern))
    return np.flatnonzero((windows == pattern).all(-1))
