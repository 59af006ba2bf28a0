"""Think blocks: the ids before every trained answer are the prompt of inference, and the model trains on what it
writes.

The oracle is transformers' `apply_chat_template` with `add_generation_prompt` on the turns before the answer. The
templates have the structure of each model generation, in our own words (tests/helpers/think_templates.py).
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, SkipSample
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.config import Learn
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.samples import turns
from tests.helpers.think_templates import EFFORT, GENERATIONS, think_hf_dir, think_template
from tests.helpers.tiny_model import tiny_hf_dir

pytestmark = pytest.mark.promise(
    "Each trained answer follows the ids of its prompt at inference, with think blocks as in the templates of "
    "Qwen3, 3.5, 3.6 and 3.8."
)

NONE = np.zeros((0, 3), np.int32)
USER, HEADER, END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
EMPTY = "<think>\n\n</think>\n\n"


def thinking(messages: tuple[Message, ...], *reasoning: str) -> tuple[Message, ...]:
    """Return the messages with these reasoning texts before their answers; an empty text means no reasoning."""
    texts = iter(reasoning)
    return tuple(dataclasses.replace(m, reasoning=next(texts)) if m.role == "assistant" else m for m in messages)


THREE = turns(
    f"{IMAGE_SLOT}Which digit?", "three", " How many strokes? ", "two.\nOne long.", f"And {IMAGE_SLOT}?", "one"
)
CASES = {
    "plain": THREE,
    "one turn": turns(f"{IMAGE_SLOT}Which digit?", "three"),
    "reasoned": thinking(THREE, "It has curves.", "\nFirst one,\n\nthen two. ", "</b> is no tag"),
    "one reasoned turn": thinking(turns("a", "b"), "Because.\n"),
    "first reasoned": thinking(THREE, "It has curves.", "", ""),
    "last reasoned": thinking(THREE, "", "", "It is thin."),
    "with a system message": (Message(role="system", text="Be brief."), *thinking(THREE, "x", "", "y")),
    "same answers": turns("yes?", "yes", "yes?", "yes", "yes?", "yes"),
    "an answer is given": tuple(dataclasses.replace(m, is_learnt=m.text != "three") for m in THREE),
    "the last is given": tuple(
        dataclasses.replace(m, is_learnt=m.text != "one") for m in thinking(THREE, "x", "", "y")
    ),
}
# Number of samples of each case, for templates that rewrite history and for templates that keep it.
REWRITTEN = {"one turn": 1, "one reasoned turn": 1, "an answer is given": 2, "the last is given": 2}
KEPT = {"first reasoned": 2, "last reasoned": 2, "with a system message": 2, "the last is given": 2}


@pytest.fixture(scope="module", params=GENERATIONS)
def generation(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def chat(generation, tmp_path_factory) -> ChatEncoder:
    return ChatEncoder(ModelDirectory(think_hf_dir(generation, tmp_path_factory.mktemp("hf"))))


def prompt_ids(chat: ChatEncoder, messages: tuple[Message, ...], grids: np.ndarray, thinks: bool) -> list[int]:
    """Return the ids that inference reads, by transformers only."""
    raw = []
    for message in messages:
        pieces = [{"type": "text", "text": text} for text in message.text.split(IMAGE_SLOT)]
        parts = [part for piece in pieces for part in ({"type": "image"}, piece)][1:]
        raw.append({"role": message.role, "content": parts if message.role == "user" else message.text})
        if message.reasoning and chat.learn.reasoning:
            raw[-1]["reasoning_content"] = message.reasoning
    text = chat.tokenizer.apply_chat_template(raw, tokenize=False, add_generation_prompt=True, enable_thinking=thinks)
    for grid in grids:
        text = text.replace("<|image_pad|>", "<image>" * int(grid.prod() // 4), 1)
    return chat.tokenizer(text.replace("<image>", "<|image_pad|>"), add_special_tokens=False)["input_ids"]


def written(generation: str, message: Message, reasoning: bool = True) -> str:
    """Return the text that inference writes."""
    answer = f"{message.text.strip()}<|im_end|>"
    if not (message.reasoning and reasoning):
        return answer
    begin = "<think>\n" if generation == "qwen3" else ""
    return f"{begin}{message.reasoning.strip()}\n</think>\n\n{answer}"


def learnt_spans(
    chat: ChatEncoder, parts: Sequence[tuple[Message, ...]], grids: np.ndarray
) -> Iterator[tuple[np.ndarray, int, int, int]]:
    """Yield (ids, start, end, place of the message) of every answer that the parts train on."""
    for part in parts:
        ids, mask = chat.encode(part, grids[: num_images(part)])
        runs = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2)
        for (start, end), place in zip(runs, to_learn(part), strict=True):
            yield ids, start, end, place


def num_images(messages: Sequence[Message]) -> int:
    return sum(m.text.count(IMAGE_SLOT) for m in messages)


def to_learn(messages: Sequence[Message]) -> list[int]:
    """Return the places of the answers to train on."""
    return [place for place, m in enumerate(messages) if m.role == "assistant" and m.is_learnt]


def check_exact(chat: ChatEncoder, generation: str, messages: tuple[Message, ...]) -> list[tuple[Message, ...]]:
    """Check every trained answer of every part, and that each is trained on once; return the parts."""
    grids = np.array([[1, 2 * (i + 1), 4] for i in range(2)], np.int32)
    (parts,) = chat.cut([messages])
    learnt = []
    for ids, start, end, place in learnt_spans(chat, parts, grids):
        before = messages[:place]
        thinks = bool(messages[place].reasoning) and chat.learn.reasoning
        assert ids[:start].tolist() == prompt_ids(chat, before, grids[: num_images(before)], thinks), place
        assert chat.decode(ids[start:end]) == written(generation, messages[place], chat.learn.reasoning), place
        learnt.append(place)
    assert sorted(learnt) == to_learn(messages)
    return parts


@pytest.mark.parametrize("case", CASES)
def test_what_is_learnt_follows_what_inference_sees(chat, generation, case):
    parts = check_exact(chat, generation, CASES[case])
    assert len(parts) == (KEPT.get(case, 1) if generation == "qwen3_8" else REWRITTEN.get(case, 3))


@pytest.mark.parametrize("case", CASES)
def test_without_reasoning_answers_are_those_of_a_model_that_does_not_think(chat, generation, monkeypatch, case):
    hf_dir = Path(chat.tokenizer.name_or_path)
    plain = ChatEncoder(ModelDirectory(hf_dir), Learn(reasoning=False))
    parts = check_exact(plain, generation, CASES[case])
    assert len(parts) == (1 if generation == "qwen3_8" and case != "the last is given" else len(parts))
    for part in parts:
        (text,) = plain.tokenize([part])
        assert EFFORT not in plain.decode(text.ids)
        (bare,) = plain.tokenize([thinking(part, *[""] * 3)])
        assert np.array_equal(text.ids, bare.ids) and np.array_equal(text.mask, bare.mask)


def shown(chat: ChatEncoder, messages: tuple[Message, ...]) -> list[str]:
    """Return the text of each part, with the trained spans in brackets."""
    texts = []
    for part in chat.cut([messages])[0]:
        ids, mask = chat.encode(part, NONE)
        edges = [0, *np.flatnonzero(np.diff(mask, prepend=0, append=0)), len(ids)]
        pieces = [chat.decode(ids[a:b]) for a, b in itertools.pairwise(edges)]
        texts.append("".join(f"[{piece}]" if i % 2 else piece for i, piece in enumerate(pieces)))
    return texts


A_B, C = f"{USER}a{END}{HEADER}", f"{END}{USER}c{END}{HEADER}"
LEARNT_D = "[d<|im_end|>]\n"


@pytest.mark.parametrize("generation", ["qwen3_5", "qwen3_5_small", "qwen3_6"], indirect=True)
def test_masks_of_3_5_and_3_6(chat):
    """An empty block is prompt, and so is the opening tag of a block with reasoning; history has no blocks."""
    plain, reasoned = turns("a", "b", "c", "d"), thinking(turns("a", "b", "c", "d"), "why", "so")
    assert shown(chat, plain) == [f"{A_B}{EMPTY}[b<|im_end|>]\n", f"{A_B}b{C}{EMPTY}{LEARNT_D}"]
    assert shown(chat, reasoned) == [
        f"{A_B}<think>\n[why\n</think>\n\nb<|im_end|>]\n",
        f"{A_B}b{C}<think>\n[so\n</think>\n\nd<|im_end|>]\n",
    ]
    mixed = thinking(turns("a", "b", "c", "d"), "why", "")
    assert shown(chat, mixed) == [shown(chat, reasoned)[0], shown(chat, plain)[1]]
    with pytest.raises(SkipSample, match="mask_span_mismatch: found 'b' for the answer 'b'"):
        chat.encode(plain, NONE)  # uncut, where at inference a block comes before b


@pytest.mark.parametrize("generation", ["qwen3_8"], indirect=True)
def test_masks_of_3_8(chat):
    """History keeps its blocks, so one text is exact; when the model thinks, an instruction comes first."""
    plain, reasoned = turns("a", "b", "c", "d"), thinking(turns("a", "b", "c", "d"), "why", "so")
    effort = f"<|im_start|>system\n{EFFORT}{END}"
    assert shown(chat, plain) == [f"{A_B}{EMPTY}[b<|im_end|>]\n{C.removeprefix(END)}{EMPTY}{LEARNT_D}"]
    first = f"{effort}{A_B}<think>\n[why\n</think>\n\nb<|im_end|>]\n"
    assert shown(chat, reasoned) == [f"{first}{C.removeprefix(END)}<think>\n[so\n</think>\n\nd<|im_end|>]\n"]
    assert shown(chat, thinking(plain, "why", "")) == [first, f"{A_B}<think>\nwhy\n</think>\n\nb{C}{EMPTY}{LEARNT_D}"]


def chat_with(begin: str, generation: str, directory: Path) -> ChatEncoder:
    """Return the encoder of a generation's template behind a text of Jinja."""
    hf_dir = think_hf_dir(generation, directory)
    (hf_dir / "chat_template.jinja").write_text(begin + think_template(generation))
    return ChatEncoder(ModelDirectory(hf_dir))


def test_a_template_whose_flag_keeps_thinking_needs_no_cut(tmp_path):
    chat = chat_with("{%- set preserve_thinking = true -%}\n", "qwen3_6", tmp_path)
    for case in ("plain", "reasoned", "last reasoned"):
        assert len(check_exact(chat, "qwen3_6", CASES[case])) == 1


def test_a_template_that_writes_no_reasoning_learns_answers_alone():
    chat = ChatEncoder(ModelDirectory(tiny_hf_dir()))
    assert chat.format.opened is None and chat.format.is_fixed
    messages = thinking(turns("a", "b", "c", "d"), "why", "so")
    (parts,) = chat.cut([messages])
    assert parts == [messages]
    ids, mask = chat.encode(messages, NONE)
    plain_ids, plain_mask = chat.encode(turns("a", "b", "c", "d"), NONE)
    assert np.array_equal(ids, plain_ids) and np.array_equal(mask, plain_mask)


def test_conversations_are_cut_together_as_one_by_one(chat):
    together = chat.cut(list(CASES.values()))
    assert together == [chat.cut([messages])[0] for messages in CASES.values()]


def test_the_last_answer_alone_needs_no_cut(generation, chat, monkeypatch):
    monkeypatch.setattr(chat, "learn", Learn(answers="last"))
    for messages in (CASES["plain"], CASES["reasoned"], CASES["first reasoned"]):
        assert chat.cut([messages]) == [[messages]]


@pytest.mark.parametrize("text", ["</think>", "<|im_end|>", IMAGE_SLOT])
def test_reasoning_holds_no_token_of_the_chat(chat, text):
    with pytest.raises(SkipSample, match="special_token_in_text"):
        chat.encode(thinking(turns("a", "b"), f"why {text}"), NONE)


def test_a_prompt_that_cannot_think_leaves_reasoning_out(tmp_path):
    refuses = "{%- if enable_thinking -%}{{- raise_exception('never') -}}{%- endif -%}"
    chat = chat_with(refuses, "qwen3_5", tmp_path)
    assert shown(chat, thinking(turns("a", "b"), "why")) == [f"{A_B}{EMPTY}[b<|im_end|>]\n"]


def test_a_refused_turn_costs_that_turn_alone(tmp_path):
    refuses = "{%- if messages[-1].content == 'no' -%}{{- raise_exception('no') -}}{%- endif -%}"
    chat = chat_with(refuses, "qwen3_5", tmp_path)
    (parts,) = chat.cut([turns("a", "b", "c", "no", "e", "f")])
    first, refused, last = chat.tokenize(parts)
    assert isinstance(refused, SkipSample) and refused.detail == "the chat template refuses the conversation: no"
    assert not isinstance(first, SkipSample) and not isinstance(last, SkipSample)
