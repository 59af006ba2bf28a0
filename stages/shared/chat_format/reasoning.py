"""Reasoning in a chat template: its format before an answer, and the answers that one text can be trained on.

For an answer, a model reads the template's prompt of the turns before it, and writes the rest of the turn. Templates of
thinking models write a turn differently once it is history (Qwen3.5 leaves out its think block), or begin the
conversation differently if reasoning is requested (Qwen3.8). So one text of several turns may be right only for its
last answer. An answer may be trained on in a text only if that text begins with the text in which the answer is last.
`mismatch` tries that on small conversations.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dataset_builders.contracts.sample import Message, SkipSample
from stages.shared.chat_format.template import TRIAL_PAIRS

if TYPE_CHECKING:
    from stages.shared.chat_format.chat import ChatEncoder

Conversation = tuple[Message, ...]
Render = Callable[[Sequence[Sequence[Message]]], list[str | SkipSample]]

_ANSWER, _THOUGHT = "b", "why"
_TRIAL_TURNS = 3
_THOUGHT_OF_A_TRIAL = "It has a stroke."


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """A template's format of an answer's turn."""

    closed: str = ""  # the prompt after the assistant header if no reasoning is requested: nothing, or an empty block
    opened: str | None = None  # the same if reasoning is requested; None: the template writes no reasoning
    before: str = ""  # the text that the model writes before its reasoning
    between: str = ""  # the text that it writes between reasoning and answer
    # For answers without reasoning, and for answers with reasoning: whether the text of a conversation begins with the
    # texts up to each of its answers.
    keeps: tuple[bool, bool] = (True, True)

    @property
    def is_fixed(self) -> bool:
        """Whether every conversation begins with the texts up to each of its answers, because there is no reasoning."""
        return self.opened is None and self.keeps[0]

    def given(self, reasoning: str) -> str:
        """Return the text between the assistant header and the part that the model generates."""
        return (self.opened or "") if reasoning else self.closed

    def written(self, reasoning: str, answer: str) -> str:
        """Return the text that the model generates before the end of its turn."""
        return f"{self.before}{reasoning}{self.between}{answer}" if reasoning else answer


def read_format(
    question: str, prompts: Sequence[str | SkipSample], render: Render, header: str, end: str
) -> ReasoningFormat:
    """Detect the format of a template, from texts of small conversations.

    Args:
        question: the first user's text in these conversations.
        prompts: the prompt of `question` without reasoning, and with it; or the reason why there is none.
        header, end: the beginning and the end of an answer's turn.
    """
    closed, opened = (str(prompt).rpartition(header)[2] for prompt in prompts)
    plain, thought = (render(_trials(question, reasoning)) for reasoning in ("", _THOUGHT))
    known = ReasoningFormat(closed=closed, keeps=(_keeps(plain), _keeps(thought)))
    # If the template refused the prompt or the conversation, `opened` is not found in the conversation's text.
    _, is_opened, turn = str(thought[0]).rpartition(header + opened)
    before, found, rest = turn.partition(_THOUGHT)
    between, answer, _ = rest.partition(_ANSWER + end)
    if not (is_opened and found and answer):
        return known
    return dataclasses.replace(known, opened=opened, before=before, between=between)


def cut_conversations(
    conversations: Sequence[Conversation],
    trained: Sequence[Sequence[bool]],
    reasoned: Sequence[Sequence[bool]],
    render: Render,
    keeps: tuple[bool, bool],
) -> list[list[Conversation]]:
    """Cut each conversation into parts, each up to one of its answers, so that all answers are trained on.

    The number of parts is as small as possible. Each part masks the answers that another part is trained on. A
    conversation that can be trained on in one text is returned unchanged.

    Args:
        trained: for each assistant message of each conversation, whether it is trained on.
        reasoned: for each message of each conversation, whether the template is given reasoning before it.
    """
    cut = [[messages] for messages in conversations]
    looked_at: dict[int, list[int]] = {}  # number of a conversation -> indices of its answers to train on
    for number, (messages, flags) in enumerate(zip(conversations, trained)):
        answers = [place for place, message in enumerate(messages) if message.role == "assistant"]
        places = [place for place, is_trained in zip(answers, flags) if is_trained]
        kinds = {reasoned[number][place] for place in answers}
        if places and places != [len(messages) - 1] and (len(kinds) > 1 or not keeps[kinds.pop()]):
            looked_at[number] = places
    texts = iter(render([conversations[n][: place + 1] for n, places in looked_at.items() for place in places]))
    for number, places in looked_at.items():
        cut[number] = _parts(conversations[number], {place: next(texts) for place in places})
    return cut


def _parts(messages: Conversation, texts: dict[int, str | SkipSample]) -> list[Conversation]:
    """Return the parts of one conversation, from the text up to each of its answers to train on."""
    parts: list[Conversation] = []
    while texts:
        end = max(texts)  # the text up to the last answer also trains the answers with whose own texts it begins
        whole = texts[end]
        taught = {place for place, text in texts.items() if place == end or _begins(whole, text)}
        texts = {place: text for place, text in texts.items() if place not in taught}
        given = (place for place, m in enumerate(messages[: end + 1]) if m.role == "assistant" and place not in taught)
        part = list(messages[: end + 1])
        for place in given:
            part[place] = dataclasses.replace(part[place], is_learnt=False)
        parts.append(tuple(part))
    return parts[::-1]


def _trials(question: str, reasoning: str) -> list[Conversation]:
    """Return conversations of one, two and three turns."""
    questions = [question, *["a"] * (_TRIAL_TURNS - 1)]
    answer = Message(role="assistant", text=_ANSWER, reasoning=reasoning)
    messages = tuple(message for text in questions for message in (Message(role="user", text=text), answer))
    return [messages[: 2 * turns] for turns in range(1, _TRIAL_TURNS + 1)]


def _keeps(texts: Sequence[str | SkipSample]) -> bool:
    return all(_begins(texts[-1], text) for text in texts)


def _begins(whole: str | SkipSample, text: str | SkipSample) -> bool:
    return isinstance(whole, str) and isinstance(text, str) and whole.startswith(text)


def mismatch(chat: "ChatEncoder") -> str:
    """Return the first trial in which the ids before a trained answer differ from its prompt, in words; empty if none.

    The trials are conversations of one, two and three turns, with and without a system message, and with reasoning if
    the template writes it. A conversation that the template refuses is skipped.
    """
    trials = dict(_small_conversations(has_reasoning=chat.format.opened is not None and chat.learn.reasoning))
    texts = chat.render(list(trials.values()))
    names = [name for name, text in zip(trials, texts) if not isinstance(text, SkipSample)]
    parts = [(n, part) for n, cut in zip(names, chat.cut([trials[n] for n in names])) for part in cut]
    places: list[tuple[str, Conversation, int, np.ndarray]] = []  # trial, its part, index of an answer, ids before it
    for (name, part), text in zip(parts, chat.tokenize([part for _, part in parts])):
        if isinstance(text, SkipSample):
            return f"with {name} {text.detail}"
        # Every other change of the mask is the start of a trained answer.
        starts = np.flatnonzero(np.diff(text.mask, prepend=0, append=0))[::2]
        trained = [place for place, message in enumerate(part) if message.role == "assistant" and message.is_learnt]
        # all answers, or only the last one
        places += [(name, part, p, text.ids[:s]) for p, s in zip(trained[-len(starts) :], starts, strict=True)]
    for thinks in (False, True):
        asked = [each for each in places if bool(chat.reasoning_of(each[1][each[2]])) == thinks]
        prompts = chat.render([part[:place] for _, part, place, _ in asked], add_generation_prompt=True, thinks=thinks)
        for (name, _, place, ids), prompt in zip(asked, prompts):
            if isinstance(prompt, SkipSample):
                return f"with {name} {prompt.detail}"
            if not np.array_equal(chat.token_ids(prompt), ids):
                return f"with {name} the ids before message {place} are not those of its prompt at inference"
    return ""


def _small_conversations(has_reasoning: bool) -> Iterator[tuple[str, Conversation]]:
    """Yield (name, conversation) of each trial."""
    for system in ((), (Message(role="system", text="Be brief."),)):
        for reasoning in ("", _THOUGHT_OF_A_TRIAL)[: 1 + has_reasoning]:
            for number in range(1, len(TRIAL_PAIRS) + 1):
                messages = list(system)
                for question, answer in TRIAL_PAIRS[:number]:
                    messages.append(Message(role="user", text=question))
                    messages.append(Message(role="assistant", text=answer, reasoning=reasoning))
                about = f"{number} turn{'s' * (number > 1)}{' and a system message' * bool(system)}"
                yield f"{about}{' and reasoning' * bool(reasoning)}", tuple(messages)
