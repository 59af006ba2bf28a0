"""Two models on the same questions: the difference, its interval, the rows that differ, and the page."""

import base64
import io
import json
import re

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import pixels_png
from stages.compare.comparison import compare_predictions
from stages.compare.stage import _stats, _table, shown_keys, write_comparison_report
from stages.shared.pages.page import artifact_page
from stages.shared.scoring.intervals import Bootstrap
from stages.shared.scoring.subsets import SubsetMetrics
from tests.helpers.evaluation import conversation
from tests.helpers.pages import assert_images_told

pytestmark = pytest.mark.promise(
    "The gain over the model before training has a paired bootstrap interval, and gates keep a model out of the "
    "registry, one that never learnt to end its answers too, but not its sound twin."
)

BOOTSTRAP = Bootstrap(resamples=2000, level=0.95, seed=1)
IMAGE = pixels_png(np.full((12, 12), 200, np.uint8))


def predictions(answers: dict[str, list[str]], references: dict[str, list[str]]) -> pa.Table:
    """Return answers by subset, one per sample, each sample with its own image."""
    rows = []
    for subset, given in answers.items():
        for number, (answer, reference) in enumerate(zip(given, references[subset], strict=True)):
            asked = {"question": f"Question {number}?", "pictures": [f"{subset}{number}"], "image": IMAGE, "turn": 0}
            said = {"references": [reference], "answer": answer, "boxes": None}
            rows.append({"key": f"{subset}/{number:08d}", "subset": subset, **asked, **said})
    return pa.Table.from_pylist(rows)


def sample(key: str, num_images: int) -> Sample:
    return conversation(key, [("<image>" * num_images + "Which?", "7")], [IMAGE] * num_images)


REFERENCES = {"digits_single": ["7"] * 40, "rendered_text": ["abcd"] * 20}
BASE = predictions({"digits_single": ["7"] * 4 + ["1"] * 36, "rendered_text": ["abzz"] * 20}, REFERENCES)
TUNED = predictions({"digits_single": ["3"] + ["7"] * 38 + ["1"], "rendered_text": ["abcz"] * 20}, REFERENCES)
METRICS = {
    "digits_single": SubsetMetrics(headline="exact_match", others=(), reason=""),
    "rendered_text": SubsetMetrics(headline="cer", others=(), reason=""),
}
WORSE = "digits_single/00000000"  # the only sample on which the tuned model is worse


@pytest.fixture(scope="module")
def comparison():
    return compare_predictions(BASE, TUNED, METRICS, BOOTSTRAP)


def test_the_difference_of_each_subset_and_of_their_mean(comparison):
    single, text = comparison.differences["digits_single"], comparison.differences["rendered_text"]
    assert single.difference == pytest.approx(38 / 40 - 4 / 40) and single.excludes_zero and single.low > 0.6
    assert (single.wins, single.losses, single.ties) == (35, 1, 4)
    assert text.difference == pytest.approx(0.25 - 0.5) and (text.wins, text.losses) == (20, 0)
    whole = comparison.differences["overall"]
    assert whole.difference == pytest.approx((34 / 40 + 0.25) / 2) and whole.excludes_zero


def test_gains_are_upwards_also_for_error_rates(comparison):
    gains = comparison.gains()
    assert gains["cer/rendered_text"] == gains["score/rendered_text"] == pytest.approx((0.25, 0.25))
    assert gains["score"][0] > 0.3 and gains["exact_match/digits_single"][0] > 0.6


def test_the_table_begins_with_what_differs_most(comparison):
    table = _table(BASE, TUNED, comparison).to_pylist()
    assert len(table) == 60
    gains = [row["gain"] for row in table]
    assert [abs(gain) for gain in gains] == sorted((abs(gain) for gain in gains), reverse=True)
    worst = next(row for row in table if row["gain"] < 0)
    assert (worst["key"], worst["base"], worst["tuned"]) == ("digits_single/00000000", "7", "3")
    assert (worst["metric"], worst["base_score"], worst["tuned_score"]) == ("exact_match", 1.0, 0.0)
    text = next(row for row in table if row["subset"] == "rendered_text")
    assert (text["metric"], text["base_score"], text["tuned_score"], text["gain"]) == ("cer", 0.5, 0.75, 0.25)


def test_a_model_against_itself_differs_in_nothing():
    same = compare_predictions(BASE, BASE, METRICS, BOOTSTRAP)
    assert {(d.difference, d.low, d.high, d.excludes_zero) for d in same.differences.values()} == {(0, 0, 0, False)}
    assert not same.rows.any()


@pytest.mark.parametrize("name", ["key", "question", "references"])
def test_other_questions_are_refused(name):
    column = [["8"]] * 60 if name == "references" else ["other"] * 60
    other = TUNED.set_column(TUNED.schema.get_field_index(name), name, [column])
    with pytest.raises(InputError, match=f"differ in {name}"):
        compare_predictions(BASE, other, METRICS, BOOTSTRAP)
    with pytest.raises(InputError, match="differ in key"):
        compare_predictions(BASE, TUNED.slice(1), METRICS, BOOTSTRAP)


def test_the_page_shows_both_answers_and_the_numbers(comparison, tmp_path):
    table = _table(BASE, TUNED, comparison)
    keys = shown_keys(table)
    assert len(keys) == 1 + 48
    samples = {key: sample(key, 2 if key == WORSE else 1) for key in keys}
    write_comparison_report(tmp_path, comparison, table, samples)
    page = artifact_page(tmp_path, Manifest(stage="compare", version=1, fingerprint="0" * 16, config={}, parents={}))
    assert "Worse than before (1 in all" in page and "Better than before (55 in all" in page
    assert "before (1): 7" in page and "after (0): 3" in page and page.count("data:image/png") == 1 + 48
    assert_images_told(page)
    sizes = [Image.open(io.BytesIO(base64.b64decode(data))).size for data in re.findall(r"png;base64,([^\"]+)", page)]
    assert sizes[0][0] > 1.9 * sizes[1][0], "one picture of two is shown"
    report = json.loads((tmp_path / "report.json").read_text())
    summary, others = report["summary"], report["sections"][-1]
    assert len(others["rows"]) == 56 - (1 + 48) and not keys & {row[0] for row in others["rows"]}, "each is shown once"
    assert summary["answers"] == {"better": 55, "worse": 1, "alike": 4}
    assert summary["score before"] == pytest.approx((0.1 + 0.5) / 2)


def test_the_stats_are_plain_numbers(comparison):
    stats = json.loads(json.dumps(_stats(comparison)))
    found = stats["subsets"]["rendered_text"]
    assert found["metric"] == "cer" and found["base"]["value"] == 0.5 and found["base_score"] == 0.5
    assert stats["subsets"]["overall"]["difference"]["excludes_zero"] is True
    assert stats["gains"]["score"][0] > 0
