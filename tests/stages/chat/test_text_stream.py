"""An answer's text comes in whole characters, adds up to the text of all tokens, and ends before a stop text."""

import numpy as np
import pytest

from stages.answer.greedy_decoder import Row
from stages.answer.transformers_engine import Generator
from stages.chat.text_stream import TextStream
from tests.helpers.evaluation import talkative_hf_dir

pytestmark = pytest.mark.promise(
    "`athanor serve` gives many users at once the answers of one alone, to OpenAI's own client too; hang-ups "
    "and failures harm nobody else."
)


@pytest.fixture(scope="module")
def generator():
    return Generator(talkative_hf_dir())


def pushed(generator, ids, stops=(), together=1):
    stream = TextStream(generator.tokenizer, stops)
    pieces = [stream.push(ids[i : i + together]) for i in range(0, len(ids), together)]
    return [*pieces, stream.finish()], stream.is_stopped


@pytest.mark.parametrize("together", [1, 3])
def test_the_pieces_add_up_to_the_answer_that_is_scored(generator, together):
    """Random tokens are mostly single bytes: broken characters in the middle and at the end, and special tokens."""
    draw = np.random.default_rng(0)
    for _ in range(50):
        ids = draw.integers(0, generator.tokenizer.get_vocab_size(), draw.integers(1, 40)).tolist()
        pieces, _ = pushed(generator, ids, together=together)
        assert "".join(pieces) == generator.answer_of(Row(0, 99, ids)).text


def test_a_character_of_several_tokens_comes_whole(generator):
    ids = generator.tokenizer.encode("a\u20ac\U0001f642b").ids
    pieces, _ = pushed(generator, ids)
    assert len(ids) > 4 and "".join(pieces) == "a\u20ac\U0001f642b"
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two th"], "one "),
        ("one two three", ["eee", "never"], "one two three"),
        ("aab", ["ab"], "a"),
        ("two", ["two"], ""),
        ("one tw", ["two"], "one tw"),
    ],
)
def test_nothing_of_a_stop_text_is_given_out(generator, text, stops, wanted):
    ids = [token for letter in text for token in generator.tokenizer.encode(letter).ids]
    pieces, stopped = pushed(generator, ids, stops)
    assert "".join(pieces) == wanted and stopped == (wanted != text)
