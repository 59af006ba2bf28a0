"""The table of subsets, and how a recipe changes it."""

import pytest

from dataset_builders.contracts.manifest import SubsetOrigin
from dataset_builders.errors import InputError
from dataset_builders.sources.registry import HUB_SUBSETS, KNOWN_SUBSETS
from stages.shared.scoring.subsets import METRICS, SUBSETS, check_overrides, metrics_of

CAULDRON = HUB_SUBSETS["HuggingFaceM4/the_cauldron"]


def origin(name: str, builder: str = "the_cauldron") -> SubsetOrigin:
    return SubsetOrigin(builder=builder, name=name)


def test_every_subset_of_the_cauldron_and_cord_is_there():
    assert set(KNOWN_SUBSETS["the_cauldron"]) == {*CAULDRON, "cord_v2"} and len(CAULDRON) == 50
    assert SUBSETS.keys() == {name for subsets in KNOWN_SUBSETS.values() for name in subsets}


def test_a_subset_names_metrics_that_there_are_once_each_and_a_reason():
    for subset, metrics in SUBSETS.items():
        assert set(metrics.names) <= METRICS.keys(), subset
        assert len(set(metrics.names)) == len(metrics.names) and metrics.names[0] == metrics.headline, subset
        assert 5 < len(metrics.reason) < 90, subset


def test_vqa_accuracy_is_no_default_where_one_answer_is_kept():
    assert all("vqa_accuracy" not in metrics.names for metrics in SUBSETS.values())


def test_a_recipe_overrides_the_table_for_its_subsets_alone():
    overrides = {"vqav2": ["vqa_accuracy", "vqa_em"], "my_own": ["wer"]}
    vqav2 = metrics_of("vqav2", origin("vqav2"), overrides)
    assert (vqav2.headline, vqav2.others) == ("vqa_accuracy", ("vqa_em",))
    assert "evaluate.metrics.vqav2" in vqav2.reason
    assert metrics_of("my_own", origin("my_own", "table"), overrides).names == ("wer",)
    assert metrics_of("okvqa", origin("okvqa"), overrides) == SUBSETS["okvqa"]
    assert metrics_of("another_of_my_own", origin("another_of_my_own"), overrides).headline == "exact_match"


def test_a_subset_of_a_listed_source_is_known_by_its_own_name_and_overridden_by_its_full_one():
    listed = metrics_of("web_docvqa", origin("docvqa"), {"docvqa": ["cer"]})
    assert listed.names == SUBSETS["docvqa"].names and listed.reason == f"docvqa: {SUBSETS['docvqa'].reason}"
    assert metrics_of("web_docvqa", origin("docvqa"), {"web_docvqa": ["wer"]}).names == ("wer",)
    assert metrics_of("c_cord_v2_test", origin("cord_v2_test", "cord_v2"), {}).headline == "cord_nted"


@pytest.mark.parametrize(
    ("subset", "read", "why"),
    [
        ("x_iam", origin("x_iam"), "an unknown subset"),
        ("x_iam", origin("x_iam", "table"), "an unknown subset"),
        ("x_iam", origin("iam", "table"), "read by table, so not taken for the known iam"),
        ("docvqa", origin("docvqa", "llava"), "read by llava, so not taken for the known docvqa"),
        ("ai2d", origin("ai2d", "cord_v2"), "read by cord_v2, so not taken for the known ai2d"),
    ],
)
def test_a_subset_that_is_only_called_like_a_known_one_is_unknown(subset, read, why):
    metrics = metrics_of(subset, read, {})
    assert metrics.names == ("exact_match",) and metrics.reason == f"{why}: the strictest metric"


@pytest.mark.parametrize(
    ("name", "num_boxes", "names", "reason"),
    [
        ("mine", [1, 1], ["acc_iou50", "iou", "acc_iou50_95", "box_f1", "coco_map"], "every answer has one box"),
        ("mine", [1, 0], ["box_f1", "box_precision", "box_recall", "coco_map", "coco_map50"], "any number of boxes"),
        ("mine", [1, 2, None], ["box_f1", "exact_match"], "; 1 of 3 answers are no boxes and count in exact_match"),
        ("vqav2", [1, None, None], ["vqa_em", "acc_iou50"], "; 1 of 3 answers are boxes, and count in acc_iou50 too"),
        ("vqav2", [None], ["vqa_em", "exact_match"], "one of ten annotators"),
    ],
)
def test_a_subset_of_boxes_is_scored_by_boxes(name, num_boxes, names, reason):
    metrics = metrics_of(name, origin(name), {}, num_boxes)
    assert metrics.headline == names[0] and set(names) <= set(metrics.names) and reason in metrics.reason
    assert (set(metrics.names) == set(names)) == (None not in num_boxes or len(num_boxes) == 1)
    assert metrics_of(name, origin(name), {name: ["cer"]}, num_boxes).names == ("cer",)


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
    for call in (lambda: check_overrides(overrides), lambda: metrics_of("another", origin("another"), overrides)):
        with pytest.raises(InputError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
