"""The judgement of another program's answers."""

import pytest

from stages.answer.heldout import GeneratedAnswer
from stages.verify import verdict
from stages.verify.stage import draw
from stages.verify.verdict import first_of, judge, margin_bound, share
from tests.bench.bench_rounding import moved
from tests.helpers.evaluation import talkative_hf_dir
from tests.helpers.tiny_hybrid_model import talkative_hybrid_dir

pytestmark = pytest.mark.promise(
    "An export gives the same answers in transformers, PEFT and MLflow without athanor; a wrong scale, another "
    "base or other pixels are caught."
)

BOUND = margin_bound("bfloat16", 28, 2.0)
OTHER = {"prompt": None, "position": 3, "theirs": 5, "ours": 7, "spread": 2.0}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": None, "position": None}, "same"),
        (OTHER | {"margin": 0.99 * BOUND}, "rounding"),
        (OTHER | {"margin": 1.01 * BOUND}, "different"),
        (OTHER, "different"),
        ({"prompt": 4}, "other prompt"),
        ({"prompt": None, "position": None, "pixels": 1.5}, "other pixels"),
        (OTHER | {"margin": 9.0, "pixels": 0.5, "with_our_pixels": {"position": None}}, "resized"),
        (OTHER | {"margin": 9.0, "pixels": 0.5, "with_our_pixels": OTHER | {"margin": 9.0}}, "different"),
    ],
)
def test_an_answer_is_of_one_kind(row, kind):
    assert judge(row, "bfloat16", 28, 2.0) == kind


def test_float32_explains_far_less_than_bfloat16():
    assert margin_bound("float32", 28, 2.0) == pytest.approx(BOUND / 2**16) and 0.5 < BOUND < 1
    assert judge(OTHER | {"margin": 1e-3}, "float32", 28, 2.0) == "different"
    assert judge(OTHER | {"margin": BOUND, "spread": 1.0}, "bfloat16", 28, 2.0) == "different"


@pytest.mark.parametrize("model", [talkative_hf_dir, talkative_hybrid_dir])
def test_the_rounding_of_bfloat16_stays_below_the_bound(model):
    """Two programs that round differ by sqrt(2) of what one of them moves the margin by."""
    largest = float(moved(model()).max())
    assert 0.1 * verdict._SAFETY < largest < verdict._SAFETY / 2**0.5


def test_the_first_difference_is_told_with_token_and_margin():
    rows = [{"prompt": None, "position": None}, OTHER | {"margin": 2.5}]
    told = first_of("peft", ["same", "different"], rows, ["a/0", "a/1"], lambda token: f"'{token}'")
    assert told == "peft answers a/1 differently: token 3 is '5' for '7', by a margin of 2.5"
    assert share(["same", "rounding", "resized", "different"]) == 0.75


def test_questions_are_drawn_from_each_subset_in_turn():
    def answer(key: str, turn: int = 0) -> GeneratedAnswer:
        return GeneratedAnswer(key=key, turn=turn, answer="", stopped=True, ids=[])

    answers = [answer(f"{name}/{i:03d}") for name in ("a", "b") for i in range(50)] + [answer("b/000", 1)]
    drawn = [each.key for each in draw(answers, 6)]
    assert [key[0] for key in drawn] == ["a", "b"] * 3 and len(set(drawn)) == 6
    assert drawn == [each.key for each in draw(answers[::-1], 6)] and drawn != sorted(drawn)
