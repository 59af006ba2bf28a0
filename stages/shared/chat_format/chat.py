"""The encoding of a conversation: messages -> input_ids and loss_mask.

Only answers are trained on: all or the last, but never one with is_learnt=False. With each answer, the loss mask covers
its reasoning, if it has some and the template writes it, and the end-of-turn token. Answers are found by the structure
of the model's own chat template, never by a search for their text: a span runs from the ids of the assistant header to
the next end-of-turn id. Tokens that the inference prompt has after the header (an empty think block, or the start of a
block if there is reasoning) are not trained on. An answer is trained on only if the ids before it equal its inference
prompt; `cut` makes such conversations (see `reasoning.py`). A conversation with an unexpected encoding is left out with
a reason.

Text is rendered and tokenized with one placeholder per image or video, many conversations in one call, and their tokens
are inserted afterwards. The ids equal the ids of the text with every token written out.

A video is written as transformers' processors write it since 5.10: inside the pair of vision tokens of the template,
each temporal group has its time and a pair of its own.

    <|vision_start|><0.3 seconds><|vision_start|><|video_pad|>..<|vision_end|><1.3 seconds>..<|vision_end|>
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Message, SkipSample
from dataset_builders.errors import InputError
from dataset_builders.videos.sampling import FramePlan
from stages.shared.chat_format.config import LEARN_ALL, Learn
from stages.shared.chat_format.reasoning import Conversation, cut_conversations, mismatch, read_format
from stages.shared.chat_format.text import ChatText
from stages.shared.inputs.model_directory import ModelDirectory


@dataclass(frozen=True, eq=False, slots=True)
class TokenizedText:
    """A conversation as tokens, one placeholder per image or video."""

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
        self.video_token_id = shape.images.video_token_id if shape.images else -1
        self._times: dict[str, np.ndarray] = {}  # text of a time -> its ids
        self.vocab_size = shape.language.vocab_size  # rows of the embedding
        # Side of the block of patches that becomes one image token.
        self.merge_size = shape.vision.spatial_merge_size if shape.vision else 1
        for token in model.family.turn_tokens:
            if token not in self.added_tokens:
                raise InputError(f"{model.path}: the tokenizer has no {token} token; only ChatML models are supported")
        start_of_turn, self._end_of_turn = model.family.turn_tokens
        self.end_of_turn_id = self.added_tokens[self._end_of_turn]
        self._header = self.token_ids(f"{start_of_turn}assistant\n")
        token = re.search(f"{IMAGE_SLOT}|{VIDEO_SLOT}|{self._forbidden.pattern}", system_prompt or "")
        if token:
            raise InputError(f"the system prompt holds {token.group()}, a token of the chat's own; leave it out")
        self._try_template(f"{start_of_turn}assistant\n")

    def encode(
        self, messages: Sequence[Message], grids: np.ndarray, videos: Sequence[FramePlan] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode a whole conversation; SkipSample says why it cannot be encoded, or that nothing is to be trained on.

        Args:
            messages: `IMAGE_SLOT` and `VIDEO_SLOT` in a user's text mark the positions of images and videos; answers
                are stripped of outer white space.
            grids: (images, 3) int32, (t, h, w) in patches of each image, in order of the slots.
            videos: the frames of each video, in order of the slots.

        Returns:
            input_ids: (n,) int32, with all tokens of images and videos.
            loss_mask: (n,) uint8, 1 where the token itself is trained on.
        """
        (text,) = self.tokenize([messages])
        if isinstance(text, SkipSample):
            raise text
        return self.splice(text, _patches(grids), videos)

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

    def splice(
        self, text: TokenizedText, patches: np.ndarray, videos: Sequence[FramePlan] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """Insert the tokens of images and videos; return input_ids and loss_mask. See `encode`. `patches` are (images,)
        integers: the number of patches of each image, before merging."""
        places, repeats = self._places(text.ids, patches, videos)
        ids = np.repeat(text.ids, repeats)
        ids[places] = self._video_ids(videos)
        return ids, np.repeat(text.mask, repeats)

    def encode_prompt(
        self, messages: Sequence[Message], grids: np.ndarray, videos: Sequence[FramePlan] = ()
    ) -> np.ndarray:
        """Return (n,) int32: the ids of the prompt for the next answer. For arguments and errors, see `encode`."""
        ids = self.token_ids(self.render_one(messages, add_generation_prompt=True))
        return self.splice(TokenizedText(ids, np.zeros(len(ids), np.uint8)), _patches(grids), videos)[0]

    def prompt_ids(self, messages: Sequence[Message], grids: np.ndarray) -> np.ndarray:
        """Return `encode_prompt` with one placeholder per image, for an engine that inserts the image tokens."""
        ids = self.token_ids(self.render_one(messages, add_generation_prompt=True))
        self._places(ids, _patches(grids), ())  # for its check alone
        return ids

    def video_prompt_digest(self) -> str:
        """Return 64 hex digits: the SHA-256 of the prompt of a question about a small video. It tells apart the forms
        in which programs write videos."""
        side = self.model.shape.vision.patch_size * self.merge_size
        video = FramePlan(
            indices=(0, 1, 2),
            seconds=(0.0, 0.5, 1.0),
            times=(0.25, 1.0),
            height=side,
            width=2 * side,
            patch_size=self.model.shape.vision.patch_size,
        )
        ids = self.encode_prompt([Message(role="user", text=f"{VIDEO_SLOT}What moves?")], np.zeros((0, 3)), [video])
        return hashlib.sha256(self.decode(ids).encode()).hexdigest()

    def count_video_tokens(self, video: FramePlan) -> int:
        """Return the number of tokens that `splice` inserts for a video, in place of its placeholder."""
        return len(self._video_ids([video]))

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Return the number of tokens with one placeholder per image or video. Raises SkipSample as `encode`."""
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

    def _places(
        self, ids: np.ndarray, patches: np.ndarray, videos: Sequence[FramePlan]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where the tokens of videos go, (v,) bool of the ids after insertion, and (n,) int64, how often each id
        is repeated: the number of tokens at each placeholder, elsewhere 1."""
        of_images, of_videos = ids == self.image_token_id, ids == self.video_token_id
        starts = np.count_nonzero(ids == self.images.vision_start_token_id) if self.images else 0
        for kind, places, given in (("image", of_images, len(patches)), ("video", of_videos, len(videos))):
            found = np.count_nonzero(places)
            if found != given:
                raise SkipSample(f"{kind}_count_mismatch", f"{found} placeholders in the prompt, {given} {kind}s")
        if starts != len(patches) + len(videos):
            detail = f"{starts} vision tokens in the prompt, {len(patches)} images, {len(videos)} videos"
            raise SkipSample("image_count_mismatch", detail)
        repeats = np.ones(len(ids), np.int64)
        repeats[of_images] = patches // self.merge_size**2
        if videos:
            repeats[of_videos] = [self.count_video_tokens(video) for video in videos]
        return np.repeat(of_videos, repeats), repeats

    def _video_ids(self, videos: Sequence[FramePlan]) -> np.ndarray:
        """Return (v,) int32: the ids of videos, one after the other, each without the template's vision tokens."""
        groups = [(_time_text(time), video.patches) for video in videos for time in video.times]
        new = list({text: None for text, _ in groups if text not in self._times})
        self._times |= zip(new, self.token_ids_of(new))
        parts = [np.zeros(0, np.int32)]
        for text, patches in groups:
            tokens = np.full(patches // self.merge_size**2 + 2, self.video_token_id, np.int32)
            tokens[[0, -1]] = self.images.vision_start_token_id, self.images.vision_end_token_id
            parts += [self._times[text], tokens]
        return np.concatenate(parts)

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


def _time_text(seconds: float) -> str:
    return f"<{seconds:.1f} seconds>"


def _patches(grids: np.ndarray) -> np.ndarray:
    """Return (images,) int64: the number of patches of each image, before merging."""
    return np.asarray(grids, np.int64).reshape(-1, 3).prod(-1)


def _starts_of(pattern: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the start indices of `pattern` in `ids`."""
    if len(ids) < len(pattern):
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(pattern))
    return np.flatnonzero((windows == pattern).all(-1))
