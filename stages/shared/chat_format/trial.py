"""Trial conversations that check whether the ids before each trained answer equal its prompt at inference."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dataset_builders.contracts.sample import Message, SkipSample
from stages.shared.chat_format.reasoning import Conversation

if TYPE_CHECKING:
    from stages.shared.chat_format.chat import ChatEncoder

_PAIRS = (("What is it?", "A seven."), ("And now?", "Still a seven."), ("Is it odd?", "Yes."))
_THOUGHT = "It has a stroke."


def mismatch(chat: "ChatEncoder") -> str:
    """Return the first trial in which the ids before a trained answer differ from its prompt, in words; empty if none.

    The trials are conversations of one, two and three turns, with and without a system message, and with reasoning if
    the template writes it. A conversation that the template refuses is skipped.
    """
    trials = dict(_trials(has_reasoning=chat.format.opened is not None and chat.learn.reasoning))
    texts = chat.render(list(trials.values()))
    names = [name for name, text in zip(trials, texts) if not isinstance(text, SkipSample)]
    parts = [(n, part) for n, cut in zip(names, chat.cut([trials[n] for n in names])) for part in cut]
    places: list[tuple[str, Conversation, int, np.ndarray]] = []  # trial, its part, index of an answer, ids before it
    for (name, part), text in zip(parts, chat.tokenize([part for _, part in parts])):
        if isinstance(text, SkipSample):
            return f"with {name} {text.detail}"
        # Every other change of the mask is the start of a trained answer.
        starts = np.flatnonzero(np.diff(text.mask, prepend=0, append=0))[::2]
        learnt = [place for place, message in enumerate(part) if message.role == "assistant" and message.is_learnt]
        # all answers, or only the last one
        places += [(name, part, p, text.ids[:s]) for p, s in zip(learnt[-len(starts) :], starts, strict=True)]
    for thinks in (False, True):
        asked = [each for each in places if bool(chat.reasoning_of(each[1][each[2]])) == thinks]
        prompts = chat.render([part[:place] for _, part, place, _ in asked], add_generation_prompt=True, thinks=thinks)
        for (name, _, place, ids), prompt in zip(asked, prompts):
            if isinstance(prompt, SkipSample):
                return f"with {name} {prompt.detail}"
            if not np.array_equal(chat.token_ids(prompt), ids):
                return f"with {name} the ids before message {place} are not those of its prompt at inference"
    return ""


def _trials(has_reasoning: bool) -> Iterator[tuple[str, Conversation]]:
    """Yield (name, conversation) of each trial."""
    for system in ((), (Message(role="system", text="Be brief."),)):
        for reasoning in ("", _THOUGHT)[: 1 + has_reasoning]:
            for number in range(1, len(_PAIRS) + 1):
                messages = list(system)
                for question, answer in _PAIRS[:number]:
                    messages.append(Message(role="user", text=question))
                    messages.append(Message(role="assistant", text=answer, reasoning=reasoning))
                about = f"{number} turn{'s' * (number > 1)}{' and a system message' * bool(system)}"
                yield f"{about}{' and reasoning' * bool(reasoning)}", tuple(messages)
