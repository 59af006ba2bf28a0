"""Gates: which scores keep a model out of the registry, and the line that says so."""

import math

import pytest
from pydantic import ValidationError

from flows.tracking.config import Gate, refusals

pytestmark = pytest.mark.promise(
    "The gain over the model before training has a paired bootstrap interval, and gates keep a model out of the "
    "registry, one that never learnt to end its answers too, but not its sound twin."
)

SCORES = {"stop_rate": 0.25, "exact_match": 0.95, "cer": 0.2, "exact_match/pairs": 0.8, "loss": math.nan}
GAINS = {"exact_match": (0.1, 0.3), "cer": (-0.02, 0.2)}


@pytest.mark.parametrize(
    ("name", "gate", "reason"),
    [
        ("exact_match", {"min": 0.95}, None),
        ("exact_match", {"min": 0.951}, "exact_match 0.9500 is below 0.951"),
        ("stop_rate", {"min": 0.9}, "stop_rate 0.2500 is below 0.9"),
        ("cer", {"max": 0.2}, None),
        ("cer", {"max": 0.1}, "cer 0.2000 is above 0.1"),
        ("exact_match/pairs", {"min": 0.9}, "exact_match/pairs 0.8000 is below 0.9"),
        ("loss", {"max": 1.0}, "loss nan is above 1"),
        ("loss", {"min": 1.0}, "loss nan is below 1"),
        ("exact_match", {"min_gain": 0.0}, None),
        ("exact_match", {"min_gain": 0.1}, "the gain in exact_match, +0.1000 to +0.3000, does not lie above 0.1"),
        ("cer", {"min_gain": 0.0}, "the gain in cer, -0.0200 to +0.2000, does not lie above 0"),
        ("anls", {"min_gain": 0.0}, "anls was not compared with the model before training"),
    ],
)
def test_a_gate_holds_or_says_why_not(name, gate, reason):
    assert refusals({name: Gate(**gate)}, SCORES, GAINS) == ([] if reason is None else [reason])


def test_a_score_that_is_not_there_does_not_hold():
    found = refusals({"anls": Gate(min=0.1)}, {"exact_match": 1.0})
    assert found == ["anls was not measured; there are exact_match"]
    assert refusals({"anls": Gate(max=0.1)}, {}) == ["anls was not measured; there are no scores"]
    assert refusals({"exact_match": Gate(min_gain=0)}, SCORES, None) == [
        "exact_match was not compared with the model before training"
    ]


def test_a_gate_tells_why_a_score_is_low():
    why = {"same_answers": "peft answers a/1 differently"}
    found = refusals({"same_answers": Gate(min=1.0)}, {"same_answers": 0.75}, None, why)
    assert found == ["same_answers 0.7500 is below 1: peft answers a/1 differently"]
    assert refusals({"same_answers": Gate(min=1.0)}, {"same_answers": 1.0}, None, {"same_answers": ""}) == []


def test_every_gate_that_fails_is_named():
    gates = {"stop_rate": Gate(min=0.9, min_gain=0.0), "cer": Gate(max=0.1)}
    assert len(refusals(gates, SCORES, GAINS)) == 3
    assert refusals({}, {}) == []


@pytest.mark.parametrize("gate", [{}, {"min": 0.9, "max": 0.1}])
def test_a_gate_that_makes_no_sense_is_refused(gate):
    with pytest.raises(ValidationError, match=r"refuses nothing|every model would be refused"):
        Gate(**gate)
