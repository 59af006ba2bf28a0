"""Tokens are drawn by their probabilities, from the most probable ones only, and equally for equal seeds."""

import pytest
import torch

from stages.chat.drawing import Drawing

pytestmark = pytest.mark.promise(
    "`athanor serve` gives many users at once the answers of one alone, to OpenAI's own client too; hang-ups "
    "and failures harm nobody else."
)

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.15, 0.25]))


def drawn(count=4000, **settings):
    drawing = Drawing(**{"temperature": 1.0, "seed": 0, **settings})
    return [drawing(LOGITS) for _ in range(count)]


def shares(tokens):
    return torch.bincount(torch.tensor(tokens), minlength=4) / len(tokens)


def test_tokens_come_as_often_as_their_probabilities_say():
    torch.testing.assert_close(shares(drawn()), LOGITS.exp(), atol=0.03, rtol=0)
    cold = (LOGITS / 0.5).softmax(-1)
    torch.testing.assert_close(shares(drawn(temperature=0.5)), cold, atol=0.03, rtol=0)


def test_only_the_most_probable_are_drawn():
    """0.5 and 0.25 reach 0.7 together, and 0.5 alone reaches 0.5."""
    torch.testing.assert_close(shares(drawn(top_p=0.7)), torch.tensor([0, 2 / 3, 0, 1 / 3]), atol=0.03, rtol=0)
    assert set(drawn(100, top_p=0.5)) == {1} and set(drawn(100, top_p=1e-9)) == {1}


def test_equal_seeds_draw_equally_and_no_seed_does_not():
    assert drawn(50) == drawn(50) != drawn(50, seed=1)
    assert drawn(50, seed=None) != drawn(50, seed=None)
