"""A conversation as text: the messages that the model's chat template gets, and the text that it writes."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import transformers

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, SkipSample
from dataset_builders.errors import InputError, one_line
from stages.shared.chat_format.config import Learn
from stages.shared.chat_format.reasoning import ReasoningFormat
from stages.shared.chat_format.template import REASONING, Messages, chat_template, read_template
from stages.shared.inputs.model_directory import ModelDirectory

# Slot in a user's text -> the type of the part that the template gets in its place.
_PARTS = {IMAGE_SLOT: "image", VIDEO_SLOT: "video"}
_WITH_ARTICLE = {"image": "an image", "video": "a video"}
_SLOTS = re.compile("|".join(_PARTS))


class ChatText:
    """The tokenizer and the chat template of one model directory. See `chat.ChatEncoder` for the arguments."""

    def __init__(self, model: ModelDirectory, learn: Learn, system_prompt: str | None) -> None:
        self.model, self.learn, self.system_prompt = model, learn, system_prompt
        self.tokenizer = load_tokenizer(model.path)
        self.template = chat_template(model, self.tokenizer.chat_template, self.tokenizer.special_tokens_map)
        self.images = model.shape.images  # ids that mark the images of a prompt; None for a text-only model
        # How the template writes an answer's turn; `opened` until that is known, so that it is given the reasoning.
        self.format = ReasoningFormat(opened="")
        self.added_tokens = self.tokenizer.get_added_vocab()
        longest_first = sorted(self.added_tokens, key=len, reverse=True)
        self._forbidden = re.compile("|".join(re.escape(token) for token in longest_first))

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

    def render_one(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Return the text of one conversation. Raises SkipSample."""
        (text,) = self.render([messages], add_generation_prompt)
        if isinstance(text, SkipSample):
            raise text
        return text

    def _turns(self, messages: Sequence[Message]) -> Messages:
        if self.system_prompt and not any(message.role == "system" for message in messages):
            messages = [Message(role="system", text=self.system_prompt), *messages]
        turns = [{"role": message.role, "content": self._content(message)} for message in messages]
        if self.format.opened is not None:
            for turn, message in zip(turns, messages):
                turn |= {REASONING: reasoning} if (reasoning := self.reasoning_of(message)) else {}
        return turns

    def _content(self, message: Message) -> str | list[dict[str, str]]:
        assert not message.boxes, "boxes that `with_boxes_written` has not written in the text"
        token = self._forbidden.search(message.text)
        if message.reasoning:
            token = token or self._forbidden.search(message.reasoning)
        if token:
            raise SkipSample("special_token_in_text", f"{token.group()} in a {message.role} turn")
        if message.role != "user":
            if slot := _SLOTS.search(message.text) or _SLOTS.search(message.reasoning):
                raise SkipSample("special_token_in_text", f"{slot.group()} in a {message.role} turn")
            # A newline at the start of an answer would be merged with the header's newline into one token.
            return message.text.strip() if message.role == "assistant" else message.text
        slots = [*_SLOTS.finditer(message.text)]
        if not slots:
            return message.text
        if self.images is None:
            kind = _PARTS[slots[0].group()]
            raise SkipSample(f"{kind}_count_mismatch", f"{_WITH_ARTICLE[kind]} for a text-only model")
        content: list[dict[str, str]] = []
        start = 0
        for slot in slots:
            content += [{"type": "text", "text": message.text[start : slot.start()]}] * (slot.start() > start)
            content.append({"type": _PARTS[slot.group()]})
            start = slot.end()
        return content + [{"type": "text", "text": message.text[start:]}] * (start < len(message.text))

    def reasoning_of(self, message: Message) -> str:
        """Return the reasoning that the template is given before a message; empty if reasoning is not trained on."""
        if not message.reasoning or self.format.opened is None or not self.learn.reasoning:
            return ""
        return message.reasoning.strip()

    def token_ids(self, text: str) -> np.ndarray:
        """Return (n,) int32: the ids of a text."""
        (ids,) = self.token_ids_of([text])
        return ids

    def token_ids_of(self, texts: list[str]) -> list[np.ndarray]:
        """Return (n,) int32 for each text, from one call of the tokenizer."""
        if not texts:
            return []
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        return [np.array(ids, np.int32) for ids in encoded["input_ids"]]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids, including special tokens."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _normalize(self, text: str) -> str:
        # A tokenizer may normalize a text first (NFC for Qwen), and the ids then decode to the normalized text.
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        return normalizer.normalize_str(text) if normalizer else text


def slots_of(messages: Sequence[Message]) -> list[str]:
    """Return the slots of images and videos in a conversation's texts, in order."""
    return [slot for message in messages for slot in _SLOTS.findall(message.text)]


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
