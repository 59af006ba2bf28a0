"""The table of subsets, and how a recipe changes it."""

import pytest

from dataset_builders.errors import InputError
from dataset_builders.sources.registry import HUB_SUBSETS
from stages.shared.scoring.subsets import METRICS, SUBSETS, check_overrides, metrics_of

CAULDRON = HUB_SUBSETS["HuggingFaceM4/the_cauldron"]


def test_every_subset_of_the_cauldron_and_cord_is_there():
    assert len(CAULDRON) == 50
    assert SUBSETS.keys() - set(CAULDRON) == {"cord_v2", "cord_v2_train", "cord_v2_validation", "cord_v2_test"}
    assert not set(CAULDRON) - SUBSETS.keys()


def test_a_subset_names_metrics_that_there_are_once_each_and_a_reason():
    for subset, metrics in SUBSETS.items():
        assert set(metrics.names) <= METRICS.keys(), subset
        assert len(set(metrics.names)) == len(metrics.names) and metrics.names[0] == metrics.headline, subset
        assert 5 < len(metrics.reason) < 90, subset


def test_vqa_accuracy_is_no_default_where_one_answer_is_kept():
    assert all("vqa_accuracy" not in metrics.names for metrics in SUBSETS.values())


def test_a_recipe_overrides_the_table_for_its_subsets_alone():
    overrides = {"vqav2": ["vqa_accuracy", "vqa_em"], "my_own": ["wer"]}
    vqav2 = metrics_of("vqav2", overrides)
    assert (vqav2.headline, vqav2.others) == ("vqa_accuracy", ("vqa_em",))
    assert "evaluate.metrics.vqav2" in vqav2.reason
    assert metrics_of("my_own", overrides).names == ("wer",)
    assert metrics_of("okvqa", overrides) == SUBSETS["okvqa"]
    assert metrics_of("another_of_my_own", overrides).headline == "exact_match"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"chartqa": ["anlss"]}, r"evaluate\.metrics\.chartqa: no metric 'anlss'; did you mean 'anls'\?"),
        ({"chartqa": ["f1"]}, r"evaluate\.metrics\.chartqa: no metric 'f1'; known: exact_match, "),
        ({"chartqa": []}, r"evaluate\.metrics\.chartqa is empty"),
        ({"chartqa": ["cer", "cer"]}, r"evaluate\.metrics\.chartqa=\['cer', 'cer'\] names a metric twice"),
    ],
)
def test_what_a_recipe_may_not_say(overrides, message):
    for call in (lambda: check_overrides(overrides), lambda: metrics_of("another", overrides)):
        with pytest.raises(InputError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
