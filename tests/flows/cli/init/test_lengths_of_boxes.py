"""The estimates of `init` and `plan` take boxes as they will be written, not as the short mark in the text."""

import dataclasses
from types import SimpleNamespace

import pytest

from dataset_builders.contracts.boxes import Box
from dataset_builders.recognise.recognise import Trial
from flows.cli.first_rows import anomalies
from flows.cli.fit import _new_tokens, _tokens_of
from stages.convert.config import ConvertConfig
from tests.helpers.boxes import SIZE, boxed_sample

pytestmark = pytest.mark.promise(
    "`athanor plan` tells figures of the first rows and what fits a GPU, and refuses what `athanor run` would refuse."
)


def trial(*numbers: int) -> Trial:
    """Return a trial of samples with these numbers of boxes, each of them elsewhere."""
    boxes = [[Box(i, i, i + 100 + n // 2, i + 100 + n // 2, "cat") for i in range(n)] for n in numbers]
    samples = [boxed_sample(f"boxed/{i:08d}", *each) for i, each in enumerate(boxes)]
    reading = SimpleNamespace(builder="table", options={}, unused=())
    return Trial(reading, samples=samples, sizes=[SIZE] * len(samples), rows=len(samples), tried=len(samples))


def test_answers_and_bins_have_room_for_boxes():
    # A box is some 50 characters; a tokenizer of single digits makes some 30 tokens of them.
    one, twenty = (_tokens_of(trial(n), 65_536, {}, 3.0)[0] for n in (1, 20))
    assert 19 * 25 < twenty - one < 19 * 45
    assert (_new_tokens(trial(1), 3.0), _new_tokens(trial(20), 3.0), _new_tokens(trial(200), 3.0)) == (64, 1024, 4096)


def test_boxes_at_other_places_are_other_answers(tmp_path):
    samples = trial(*range(1, 12))
    samples.samples[:] = [dataclasses.replace(sample, messages=sample.messages[:2]) for sample in samples.samples]
    nothing = SimpleNamespace(problems=(), others=(), images=())
    config = ConvertConfig.model_construct(max_skip_fraction=0.1, min_heldout=10**6)
    assert not [line for line in anomalies(tmp_path, nothing, samples, config) if "little to learn" in line]
