"""The lines of a run that count the rows and samples that each stage left out."""

import pytest

from dataset_builders.contracts.manifest import Manifest, ShardEntry
from flows.cli.run import left_out_lines
from stages.shared.artifacts.left_out import LeftOut, count_reasons, write_left_out

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)


def test_every_stage_that_leaves_out_samples_has_a_line(tmp_path, monkeypatch):
    def artifact(stage: str, num_samples: int, *reasons: str, **stats: int) -> dict[str, str]:
        directory = tmp_path / "artifacts" / stage
        directory.mkdir(parents=True)
        left_out = [LeftOut(f"s/{i:08d}", reason, "") for i, reason in enumerate(reasons)]
        write_left_out(directory, left_out)
        shard = ShardEntry(
            name="train/shard-00000.tar", split="train", num_samples=num_samples, size_bytes=1, sha256="0" * 64
        )
        fields = {"stage": stage, "version": 1, "fingerprint": "0" * 16, "config": {}, "parents": {}, "files": []}
        shards = [] if stage == "plan_bins" else [shard]
        Manifest(**fields, shards=shards, skips=count_reasons(left_out), stats=stats).write(directory)
        return {"stage": stage, "dir": str(directory)}

    stages = [
        artifact("convert", 58, "image_not_found", "duplicate_sample", raw_rows=60),
        artifact("contamination", 0, raw_rows=1),
        artifact("tokenize", 55, "over_length", "bomb", "over_length"),
        artifact("plan_bins", 0, "too_many_patches"),
    ]
    (tmp_path / "artifacts/contamination/quarantine.jsonl").unlink()
    monkeypatch.chdir(tmp_path)
    assert left_out_lines(stages) == [
        "convert left out: 2 of 60 rows (duplicate_sample 1, image_not_found 1), each named in "
        "artifacts/convert/quarantine.jsonl",
        "tokenize left out: 3 of 58 samples (over_length 2, bomb 1), each named in artifacts/tokenize/quarantine.jsonl",
        "plan_bins left out: 1 of 55 samples (too_many_patches 1), each named in artifacts/plan_bins/quarantine.jsonl",
    ]
