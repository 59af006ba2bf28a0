"""Our Qwen3 against transformers': float32, CPU, random weights, two shapes, several samples in one bin."""

import pytest

from tests.helpers.bins import TEXT_ONLY, Kind
from tests.helpers.parity import (
    Pair,
    assert_logits_equal,
    assert_losses_and_gradients_equal,
    assert_weights_leave_as_they_came,
)
from tests.helpers.single_rank import single_rank
from tests.helpers.tiny_text_model import text_hf_dir

pytestmark = pytest.mark.promise(
    "Qwen3-VL, Qwen3.5, Qwen3 without images and models with experts give transformers' logits, and multi-token "
    "prediction its formula's, to 1e-4 and every gradient to 1e-4 relative, in float32."
)

KINDS, SEQ_LEN = [TEXT_ONLY, Kind(60), TEXT_ONLY, Kind(21)], 128


@pytest.fixture(scope="module", params=["first", "second"])
def pair(request):
    with single_rank() as mesh:
        yield Pair(text_hf_dir(request.param), mesh, KINDS, SEQ_LEN)


def test_logits_of_a_packed_bin(pair):
    assert_logits_equal(pair)


def test_loss_and_the_gradient_of_every_parameter(pair):
    assert_losses_and_gradients_equal(pair)


@pytest.mark.promise(
    "Weights that were not trained leave in the Hugging Face format with the bits and in the form in which they came."
)
def test_weights_in_and_out_are_bit_equal(pair, tmp_path):
    assert_weights_leave_as_they_came(pair.ours, pair.mesh, pair.hf_dir, tmp_path)
