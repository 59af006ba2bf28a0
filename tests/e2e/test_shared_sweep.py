"""A whole sweep of two adapters with cached features: one load of the base, one feature artifact, and for each run the
artifact that it makes alone."""

import pytest

from flows.cli.main import main
from tests.e2e.test_cached_features import FROZEN
from tests.e2e.test_families import DIGITS, made, own_process, run  # noqa: F401
from trainer.contract.answer import read_metrics

pytestmark = pytest.mark.promise(
    "Runs of a sweep over one loaded base have the losses, adapters and moments of a process of their own, to the bit."
)

ADAPTER = {"train.adapter": "{rank: 4, alpha: 8, targets: [attention, mlp]}", "encode_images.dtype": "float32"}


@pytest.mark.full
def test_two_adapters_share_the_base_and_the_features(tmp_path, capsys):
    settings = {**DIGITS, **FROZEN, **ADAPTER, "train.num_steps": 6}
    root = tmp_path / "sweep"
    sets = [f"--set={key}={value}" for key, value in settings.items()]
    assert main(["sweep", "--root", str(root), "--grid", "train.adapter.rank=[4,8]", *sets]) == 0
    text = capsys.readouterr().out
    assert "One process trains these over one load of the base: rank=4; rank=8." in text
    assert "train: run 2 of 2: " in text or "run 2 of 2: loss" in text
    assert len(made(root, "encode_images")) == 1
    trained = {artifact.manifest.config["adapter"]["rank"]: artifact for artifact in made(root, "train")}
    logs = {rank: (artifact.dir / "logs/trainer.log").read_text() for rank, artifact in trained.items()}
    assert logs[4].count("parameters' tensors on this rank") == 1 and "(loaded before)" in logs[8]

    alone = tmp_path / "alone"
    assert run(alone, {**settings, "train.adapter.rank": 8}) == 0
    (expected,) = made(alone, "train")
    assert (expected.dir / "manifest.json").read_bytes() == (trained[8].dir / "manifest.json").read_bytes()
    ours, theirs = ([(row.loss, row.grad_norm) for row in read_metrics(each.dir)] for each in (trained[8], expected))
    assert ours == theirs and len(ours) == 6
