"""What is trained on: messages -> input_ids and loss_mask.

The answers are learnt (all, or the last; never one whose message says no), each with its reasoning before it, if it
has some and the template writes it, with the end-of-turn token after it, and nothing else. They are found by the
structure of the model's own chat template, never by searching for their text: a span goes from the ids of the assistant
header to the next end-of-turn id. What the prompt of inference has after the header (an empty think block, or with
reasoning the beginning of one) is given and not learnt. An answer is learnt only where the ids before it are those of
its prompt: `cut` makes such conversations (see `reasoning.py`). A conversation that does not come out as expected is
left out with a reason.

Text is rendered and tokenized with one placeholder per image, many conversations in one call, and the image tokens are
spliced in afterwards; the ids are those of the text with every image token written out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import transformers

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, SkipSample
from dataset_builders.errors import InputError, one_line
from stages.encode.config import LEARN_ALL, Learn
from stages.encode.reasoning import Conversation, ReasoningFormat, cut_conversations, read_format
from stages.encode.template import REASONING, Messages, chat_template, read_template
from stages.encode.trial import mismatch
from stages.inputs.hf_directory import check_processor_files
from trainer.model.registry import read_model

SYSTEM_PROMPT = "system_prompt.txt"  # in an exported directory: the prompt that it was trained with


@dataclass(frozen=True, eq=False, slots=True)
class TokenizedText:
    """A conversation as tokens, one placeholder per image.

    Attributes:
        ids: (n,) int32.
        mask: (n,) uint8, 1 where the token itself is to be learnt.
    """

    ids: np.ndarray
    mask: np.ndarray


def learnt_answers(messages: Sequence[Message], learn: Learn) -> list[bool]:
    """For each assistant message whether it is to be learnt."""
    answers = [message for message in messages if message.role == "assistant"]
    return [m.is_learnt and (learn.answers == "all" or i == len(answers) - 1) for i, m in enumerate(answers)]


def split_turns(messages: Sequence[Message]) -> list[tuple[Message, ...]]:
    """The turns of a conversation: a new one begins with a user message after an answer."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message.role == "user" and any(m.role == "assistant" for m in turns[-1]):
            turns.append([])
        turns[-1].append(message)
    return [tuple(turn) for turn in turns]


def read_system_prompt(hf_dir: Path) -> str | None:
    """The system prompt that an exported directory was trained with, or None."""
    file = hf_dir / SYSTEM_PROMPT
    return file.read_text(encoding="utf-8") if file.is_file() else None


class ChatEncoder:
    """Encodes conversations with the tokenizer and the chat template of one HF directory.

    Args:
        learn: which answers are learnt, of those whose message does not say otherwise, and whether with reasoning.
        system_prompt: put first if a conversation has no system message of its own.

    Attributes:
        tokenizer: the directory's tokenizer.
        template: the directory's chat template.
        format: how it writes reasoning.
        images: ids that mark the images of a prompt, from config.json; None for a model of text.
        image_token_id: one of these, or -1.
        end_of_turn_id: the token that ends an answer.
        vocab_size: rows of the model's embedding.
        merge_size: side of the block of patches that becomes one image token.
        learn, system_prompt: the arguments.

    Raises:
        InputError: this file cannot mask a token, an id or the template's structure.
    """

    def __init__(self, hf_dir: Path, learn: Learn = LEARN_ALL, system_prompt: str | None = None) -> None:
        check_processor_files(hf_dir)
        family, shape = read_model(hf_dir)
        self.learn, self.system_prompt = learn, system_prompt
        self.tokenizer = load_tokenizer(hf_dir)
        self.template = chat_template(hf_dir, self.tokenizer.chat_template, self.tokenizer.special_tokens_map)
        self.images = shape.images
        self.image_token_id = shape.images.image_token_id if shape.images else -1
        self.vocab_size = shape.language.vocab_size
        self.merge_size = shape.vision.spatial_merge_size if shape.vision else 1
        added = self.tokenizer.get_added_vocab()
        for token in family.turn_tokens:
            if token not in added:
                raise InputError(f"{hf_dir}: the tokenizer has no {token} token; only ChatML models are supported")
        start_of_turn, self._end_of_turn = family.turn_tokens
        self.end_of_turn_id = added[self._end_of_turn]
        self._forbidden = re.compile("|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)))
        self._header_text = f"{start_of_turn}assistant\n"
        self._header = self.token_ids(self._header_text)
        token = re.search(f"{IMAGE_SLOT}|{self._forbidden.pattern}", system_prompt or "")
        if token:
            raise InputError(f"the system prompt holds {token.group()}, a token of the chat's own; leave it out")
        self._try_template(hf_dir)

    def reasoning_of(self, message: Message) -> str:
        """The reasoning before a message that the template is given: none if none is to be learnt."""
        if not message.reasoning or self.format.opened is None or not self.learn.reasoning:
            return ""
        return message.reasoning.strip()

    def cut(self, conversations: Sequence[Conversation]) -> list[list[Conversation]]:
        """Each conversation as one or more that teach what inference sees; all of them as they are for most templates.

        Returns:
            first turns of each, together with all its answers that are to be learnt, each in one of them.
        """
        if self.format.is_fixed:
            return [[messages] for messages in conversations]
        learnt = [learnt_answers(messages, self.learn) for messages in conversations]
        reasoned = [[bool(self.reasoning_of(m)) for m in messages] for messages in conversations]
        return cut_conversations(conversations, learnt, reasoned, self.render, self.format.keeps)

    def encode(self, messages: Sequence[Message], grids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A whole conversation.

        Args:
            messages: `IMAGE_SLOT` in a user's text is where an image goes; answers are stripped of outer white space.
            grids: (images, 3) int32, (t, h, w) in patches of each image, in order of the slots.

        Returns:
            input_ids: (n,) int32, every image token in place.
            loss_mask: (n,) uint8, 1 where the token itself is to be learnt.

        Raises:
            SkipSample: special_token_in_text, image_count_mismatch, mask_span_mismatch; empty_target: nothing to learn.
        """
        (text,) = self.tokenize([messages])
        if isinstance(text, SkipSample):
            raise text
        return self.splice(text, _patches(grids))

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Number of tokens of a conversation with one placeholder per image; raises SkipSample as `encode` does."""
        return len(self.token_ids(self._render(messages, add_generation_prompt=False)))

    def tokenize(self, conversations: Sequence[Sequence[Message]]) -> list[TokenizedText | SkipSample]:
        """Many conversations, in one call of the tokenizer; for one that cannot be encoded, why."""
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
        """input_ids and loss_mask as of `encode`, every image token in place.

        Args:
            patches: (images,) integers: patches of each image, before merging.

        Raises:
            SkipSample: image_count_mismatch.
        """
        repeats = self._repeats(text.ids, patches)
        return np.repeat(text.ids, repeats), np.repeat(text.mask, repeats)

    def encode_prompt(self, messages: Sequence[Message], grids: np.ndarray) -> np.ndarray:
        """(n,) int32: everything up to where the model has to go on. Arguments and errors as of `encode`."""
        ids = self._prompt(messages)
        return np.repeat(ids, self._repeats(ids, _patches(grids)))

    def prompt_ids(self, messages: Sequence[Message], grids: np.ndarray) -> np.ndarray:
        """`encode_prompt` with one placeholder per image, for an engine that puts in the image tokens by itself."""
        ids = self._prompt(messages)
        self._repeats(ids, _patches(grids))
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
        """The template's text of each conversation, or why there is none; `thinks` as of `ChatTemplate.render`."""
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
            # An answer that starts with a newline would melt into the header's newline, one token for both.
            return message.text.strip() if message.role == "assistant" else message.text
        if IMAGE_SLOT not in message.text:
            return message.text
        if self.images is None:
            raise SkipSample("image_count_mismatch", "an image for a model that reads text alone")
        content: list[dict[str, str]] = []
        for i, text in enumerate(message.text.split(IMAGE_SLOT)):
            content += [{"type": "image"}] if i else []
            content += [{"type": "text", "text": text}] if text else []
        return content

    def token_ids(self, text: str) -> np.ndarray:
        """(n,) int32: the ids of a text."""
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
            raise SkipSample("empty_target", f"none of {len(answers)} answers is to be learnt")
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
        """Number of the ids between the header of an answer and what the model writes.

        Args:
            turn: (n,) int32: from the header to the end of the turn.

        Raises:
            SkipSample: mask_span_mismatch: these are other ids than inference sees and writes, or in a turn that is
                given, another text than this answer's.
        """
        reasoning, text = self.reasoning_of(answer), answer.text.strip()
        given, decoded = self._given[bool(reasoning)], self.decode(turn)
        expected = self._normalize(self.format.given(reasoning) + self.format.written(reasoning, text))
        if decoded == expected and np.array_equal(turn[: len(given)], given):
            return len(given)
        if is_learnt or decoded not in (self._normalize(text), self._normalize(self.format.closed + text)):
            raise SkipSample("mask_span_mismatch", f"found {decoded[:60]!r} for the answer {text[:60]!r}")
        return 0

    def _repeats(self, ids: np.ndarray, patches: np.ndarray) -> np.ndarray:
        """(n,) int64: at each image placeholder the number of the image's tokens, elsewhere 1."""
        places = np.flatnonzero(ids == self.image_token_id)
        starts = np.count_nonzero(ids == self.images.vision_start_token_id) if self.images else 0
        if not len(places) == starts == len(patches):
            raise SkipSample("image_count_mismatch", f"{len(places)} placeholders in the prompt, {len(patches)} images")
        repeats = np.ones(len(ids), np.int64)
        repeats[places] = patches // self.merge_size**2
        return repeats

    def decode(self, ids: np.ndarray) -> str:
        """The text of token ids, special tokens spelt out."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def learnt_text(self, answer: Message) -> str:
        """The text that the learnt tokens of an answer decode to."""
        return self._normalize(self.format.written(self.reasoning_of(answer), answer.text.strip())) + self._end_of_turn

    def _normalize(self, text: str) -> str:
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def _try_template(self, hf_dir: Path) -> None:
        """Learn how the template writes an answer's turn, and try it once."""
        question = [Message(role="user", text=f"{IMAGE_SLOT}a" if self.images else "a")]
        grid = np.array([[1, self.merge_size, self.merge_size]] if self.images else [], np.int32)
        self.format = ReasoningFormat(opened="")  # so that the template is given reasoning
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
        """(n,) int32: the ids of a prompt from its only assistant header on."""
        if isinstance(prompt, SkipSample):
            raise prompt
        ids = self.token_ids(prompt)
        headers = _starts_of(self._header, ids)
        if len(headers) != 1:
            raise SkipSample("mask_span_mismatch", f"{len(headers)} assistant headers in a generation prompt")
        return ids[headers[0] + len(self._header) :]


def load_tokenizer(hf_dir: Path) -> "transformers.PreTrainedTokenizerBase":
    """The directory's tokenizer with its chat template.

    Raises:
        InputError: transformers cannot load it.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(hf_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise a dozen kinds, bare Exception among them
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
    """(images,) int64: number of patches of each image, before merging."""
    return np.asarray(grids, np.int64).reshape(-1, 3).prod(-1)


def _starts_of(pattern: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Places in `ids` where `pattern` starts."""
    if len(ids) < len(pattern):
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(pattern))
    return np.flatnonzero((windows == pattern).all(-1))
