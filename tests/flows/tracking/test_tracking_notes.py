"""The texts that a user reads in MLflow."""

import pytest

from flows.tracking.notes import experiment_note, run_name, run_note, score_text


@pytest.mark.parametrize(
    ("differs", "name"),
    [
        ({}, "embedded"),
        ({"train.optim.lr": 1e-05}, "embedded lr=1e-05"),
        (
            {"convert.seed": 1, "train.seed": 2, "train.num_steps": 3},
            "embedded convert.seed=1 train.seed=2 num_steps=3",
        ),
        ({"convert.subsets": ["ai2d", "chartqa"], "data": None}, "embedded subsets=[ai2d,chartqa] data=None"),
        (
            {"data": "s3://a-bucket/with/a/very/long/prefix/that/goes/on/and/on/the_cauldron"},
            "embedded data=s3://a-bucket/with/a/ve../on/and/on/the_cauldron",
        ),
        ({"tokenize.system_prompt": "Two\nlines"}, "embedded system_prompt=Two lines"),
    ],
)
def test_run_names_say_what_differs(differs, name):
    assert run_name("embedded", differs) == name


def test_too_many_differences_are_counted():
    name = run_name("embedded", {f"stage.field_number_{i}": i for i in range(40)})
    assert len(name) <= 250 and name.startswith("embedded field_number_0=0 ")
    shown = name.count("=")
    assert name.endswith(f" and {40 - shown} more") and shown > 8


def test_the_description_of_a_run():
    scores = {"pairs": {"exact_match": 0.5, "mean_tokens": 3.0}, "overall": {"exact_match": None}}
    note = run_note(
        "Head.",
        "#/experiments/1/runs/r",
        {"train": ("/root/train/1", ["report.html"])},
        scores,
        "0.9: champion",
        ["a 1"],
    )
    lines = note.splitlines()
    assert lines[0] == "**a 1**" and lines[4] == "Registered model: 0.9: champion." and lines[6] == "Head."
    assert lines[2] == "Reports: [train](#/experiments/1/runs/r/artifacts/stages/train/report.html)"
    assert lines.index("| overall&emsp; |  |") < lines.index("| pairs&emsp; | 0.5000 |") and "mean_tokens" not in note
    assert "[report](#/experiments/1/runs/r/artifacts/stages/train/report.html)" in note and "`/root/train/1`" in note


def test_an_experiment_links_to_the_compare_page():
    note = experiment_note(["a lr=1", "a"], ["r1", "r2"], "7")
    assert note.startswith(
        "[Score and loss of all runs](#/experiments/7/runs?viewStateShareKey=athanor&compareRunsMode="
    )
    assert "[their answers side by side](#/experiments/7/runs?compareRunsMode=ARTIFACT)" in note
    assert "2 newest](#/compare-runs?runs=%5B%22r1%22%2C%20%22r2%22%5D&experiments" in note
    assert "- a lr=1" in note


def test_a_narrow_interval_holds_its_score():
    assert score_text(1.0, (1.0, 1.0)) == "1.0000 (1.00 to 1.00)"
    assert score_text(0.9328, (0.9104, 0.9512)) == "0.9328 (0.91 to 0.95)"
    assert score_text(0.9979, (0.9969, 0.9989)) == "0.9979 (0.9969 to 0.9989)"
