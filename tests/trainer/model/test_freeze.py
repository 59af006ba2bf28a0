"""Which parameter is of which part, what freezing does, and what the contract refuses."""

import pytest

from flows.pipeline.recipe import explain
from tests.helpers.tiny_model import tiny_hf_dir
from tests.trainer.train_config import train_config
from trainer.contract.run import PartConfig, TrainConfig
from trainer.families.qwen3_vl.family import part_of, rules
from trainer.model.registry import read_model

pytestmark = pytest.mark.promise(
    "Vision, merger or language keep their bits where frozen, in every combination; each may have its own rate "
    "and decay."
)

FROZEN = {"frozen": True}


@pytest.mark.parametrize("shape", ["first", "second"])
def test_every_parameter_has_its_part(shape):
    sizes = read_model(tiny_hf_dir(shape))[1]
    names = {rule.ours: rule.hf[0] for rule in rules(sizes)}
    expected = {
        ours: "language" if ".visual." not in hf else "merger" if "merger" in hf else "vision"
        for ours, hf in names.items()
    }
    assert {ours: part_of(ours) for ours in names} == expected
    assert set(expected.values()) == set(train_config().parts)


def test_a_parameter_of_no_part_is_an_error():
    with pytest.raises(ValueError, match=r"parameter audio\.weight is neither of vision nor of language"):
        part_of("audio.weight")


def test_everything_frozen_is_refused_in_one_line():
    with pytest.raises(ValueError) as caught:
        train_config(vision=FROZEN, merger=FROZEN, language=FROZEN)
    assert explain(caught.value, TrainConfig) == (
        "vision.frozen, merger.frozen, language.frozen are all true: nothing is left to train; make one of them false"
    )


@pytest.mark.parametrize(("name", "value"), [("lr", 1e-5), ("weight_decay", 0.0)])
def test_a_rate_of_a_frozen_part_is_refused(name, value):
    with pytest.raises(ValueError) as caught:
        train_config(merger={"frozen": True, name: value})
    assert explain(caught.value, TrainConfig) == (
        f"merger: {name}={value} does nothing in a frozen part; make it null, or frozen=false"
    )


@pytest.mark.parametrize("bad", [{"lr": 0}, {"lr": 2}, {"weight_decay": -0.1}, {"rate": 1}])
def test_bounds_of_a_part(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        PartConfig(**bad)
