"""The check before the training that the stage contamination leaves held-out samples to score."""

import logging
from pathlib import Path

import pytest

from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from flows.pipeline.flow import check_heldout
from flows.pipeline.recipe import load_recipe
from stages.contamination.config import ContaminationConfig
from stages.contamination.stage import STAGE
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from tests.helpers.drawn_pictures import chart, encoded
from tests.helpers.plans import unopened
from tests.helpers.samples import make_samples_artifact, turns


def artifacts_of(directory: Path, num_copies: int, num_fresh: int) -> dict[str, Artifact]:
    """Make held-out samples. Images of the first ones occur in train as another file."""
    charts = [*range(num_copies), *range(100, 100 + num_fresh)]
    samples = [
        Sample(key=f"s/{i:08d}", messages=turns("<image>?", str(i)), images=(encoded(chart(number), "BMP"),))
        for i, number in enumerate(charts)
    ]
    train = [Sample(key=f"t/{i:08d}", messages=turns("<image>?", "a"), images=(encoded(chart(i)),)) for i in range(3)]
    shards = {"train/shard-00000.tar": train, "heldout/shard-00000.tar": samples}
    artifact = make_samples_artifact(directory / "samples", shards)
    scan = run_stage(STAGE, ContaminationConfig(), {"samples": artifact}, directory / "root").artifact
    return {"convert": artifact, "contamination": scan}


def check(artifacts: dict[str, Artifact], caplog, *settings: str) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_heldout(unopened(load_recipe(overrides=settings).config, **artifacts))
    return [record.getMessage() for record in caplog.records]


def test_nothing_left_to_score_ends_before_the_training(tmp_path, caplog):
    artifacts = artifacts_of(tmp_path, 2, 0)
    with pytest.raises(
        InputError, match=r"^2 of 2 held-out samples count in no score: 2 have .* would be left; see .*report.html"
    ):
        check(artifacts, caplog)
    assert check({"convert": artifacts["convert"]}, caplog) == []  # with contamination=null all samples count


def test_few_left_to_score_are_a_warning(tmp_path, caplog):
    artifacts = artifacts_of(tmp_path, 2, 3)
    (line,) = check(artifacts, caplog)
    assert line.startswith("2 of 5 held-out samples") and "3 are left, fewer than convert.min_heldout=10; see" in line
    assert "\n" not in line and check(artifacts, caplog, "convert.min_heldout=3") == []


def test_only_samples_that_are_asked_count(tmp_path, caplog):
    artifacts = artifacts_of(tmp_path, 2, 3)
    with pytest.raises(InputError, match="1 of 1 held-out samples"):
        check(artifacts, caplog, "evaluate.max_samples_per_subset=1")
    assert "1 are left" in check(artifacts, caplog, "evaluate.max_samples_per_subset=2")[0]  # s/00000000 and s/00000004
