"""Trial conversations: whether the ids before each learnt answer are those of its prompt at inference."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dataset_builders.contracts.sample import Message, SkipSample

if TYPE_CHECKING:
    from stages.encode.chat import ChatEncoder

_QUESTIONS, _ANSWERS = ("What is it?", "And now?", "Is it odd?"), ("A seven.", "Still a seven.", "Yes.")
_THOUGHT = "It has a stroke."


def mismatch(chat: "ChatEncoder") -> str:
    """What is wrong with the first trial whose learnt answers do not follow the ids of their prompts; empty if none is.

    There are conversations of one, two and three turns, with and without a system message, and with reasoning if the
    template writes some. One that the template itself refuses is no trial.
    """
    for system in ((), (Message(role="system", text="Be brief."),)):
        for reasoning in ("", _THOUGHT) if chat.format.opened is not None and chat.learn.reasoning else ("",):
            for num_turns in range(1, len(_QUESTIONS) + 1):
                messages = (*system, *_turns(num_turns, reasoning))
                if why := _why_not(chat, messages):
                    about = f"{num_turns} turn{'s' * (num_turns > 1)}{' and a system message' * bool(system)}"
                    return f"with {about}{' and reasoning' * bool(reasoning)} {why}"
    return ""


def _turns(number: int, reasoning: str) -> list[Message]:
    pairs = list(zip(_QUESTIONS, _ANSWERS))[:number]
    return [
        message
        for question, answer in pairs
        for message in (
            Message(role="user", text=question),
            Message(role="assistant", text=answer, reasoning=reasoning),
        )
    ]


def _why_not(chat: "ChatEncoder", messages: Sequence[Message]) -> str:
    (whole,) = chat.render([messages])
    if isinstance(whole, SkipSample):
        return ""
    (parts,) = chat.cut([tuple(messages)])
    for part, text in zip(parts, chat.tokenize(parts)):
        if isinstance(text, SkipSample):
            return text.detail
        starts = np.flatnonzero(np.diff(text.mask, prepend=0, append=0))[::2]
        places = [place for place, message in enumerate(part) if message.role == "assistant" and message.is_learnt]
        for place, start in zip(places[-len(starts) :], starts, strict=True):  # all of them, or the last alone
            thinks = bool(chat.reasoning_of(part[place]))
            (prompt,) = chat.render([part[:place]], add_generation_prompt=True, thinks=thinks)
            if isinstance(prompt, SkipSample):
                return prompt.detail
            if not np.array_equal(chat.token_ids(prompt), text.ids[:start]):
                return f"the ids before message {place} are not those of its prompt at inference"
    return ""
