"""The generation benchmark: both sides get the same questions, and it reports which answers were equal."""

import pytest
import torch

from stages.answer.greedy_decoder import GreedyDecoder
from tests.bench.bench_generate import (
    Calls,
    Measured,
    draw_questions,
    encode,
    load,
    ours,
    parse_args,
    plain,
    same,
    table,
)
from tests.bench.mix import image_token, write_model

IMAGE = image_token("qwen3_vl_tiny")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> tuple[GreedyDecoder, Calls]:
    directory = tmp_path_factory.mktemp("qwen3_vl_tiny")
    write_model(directory, "qwen3_vl_tiny")
    return load(directory, "qwen3_vl_tiny", torch.float32)


def test_questions_are_drawn_once_and_their_lengths_are_those_of_their_prompts():
    questions = draw_questions("qwen3_vl_tiny", 20, 6, 1.0, 40)
    again = draw_questions("qwen3_vl_tiny", 20, 6, 1.0, 40)
    assert [(q.limit, q.pictures, q.ids.tolist()) for q in questions] == [
        (q.limit, q.pictures, q.ids.tolist()) for q in again
    ]
    assert [len(encode(q, IMAGE).input_ids) for q in questions] == [q.length for q in questions]
    assert len({len(q.pictures) for q in questions}) > 2 and len({q.limit for q in questions}) > 5


def test_both_sides_say_the_same_and_refilling_saves_calls(loaded):
    questions, args = draw_questions("qwen3_vl_tiny", 24, 6, 1.0, 30), parse_args(["--tiny"])
    loop = plain(*loaded, questions[:6], IMAGE)
    refilled, whole = (ours(*loaded, questions, args, 8, refill) for refill in (True, False))
    assert loop.calls == sum(question.limit for question in questions[:6]), "one call a token"
    assert refilled.calls < 0.9 * whole.calls
    for way in (refilled, whole):
        assert {number: len(ids) for number, ids in way.said.items()} == {q.number: q.limit for q in questions}
        assert same(way, loop) == "6 of 6"


def test_the_table_sets_each_way_beside_the_loop():
    loop = Measured("one by one", 2.0, 6, {0: [1, 2], 1: [3]})
    other = Measured("ours", 1.0, 4, {0: [1, 2], 1: [4], 2: [5], 3: [6]})
    assert same(other, loop) == "1 of 2"
    # 5 tokens a second for 1.5
    assert table([loop, other]).splitlines()[-1] == "| ours | 4.00 | 5.0 | 3.33 | 1.00 | 1 of 2 |"
