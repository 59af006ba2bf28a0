"""The embedded data: the_cauldron's schema, readable by its builder, the same bytes every time."""

import pyarrow.parquet as pq

from dataset_builders.contracts.sample import Sample
from dataset_builders.sources.the_cauldron import CauldronOptions, iter_part, list_parts
from stages.embedded_data.digits import ROW_SCHEMA, STAGE, EmbeddedDataConfig
from stages.shared.artifacts.run_stage import run_stage
from tests.helpers.trees import tree_digest

FEW = EmbeddedDataConfig(seed=0, num_scans=60, num_multi=10, num_pairs=12, num_texts=9)


def test_the_cauldron_reads_every_row(tmp_path):
    artifact = run_stage(STAGE, FEW, {}, tmp_path).artifact
    parts = list_parts(artifact.dir, (), CauldronOptions(turns="chat"))
    samples = [item for part in parts for item in iter_part(part, CauldronOptions(turns="chat"))]
    assert all(isinstance(sample, Sample) for sample in samples)
    assert len(samples) == sum(artifact.manifest.stats["rows"].values()) == 60 + 10 + 12 + 9
    assert pq.read_schema(parts[0].path).equals(ROW_SCHEMA)
    assert (artifact.dir / "report.html").is_file()


def test_rebuilt_it_has_the_same_bytes(tmp_path):
    one, two = (run_stage(STAGE, FEW, {}, tmp_path / name).artifact.dir for name in "ab")
    assert tree_digest(one) == tree_digest(two)


def test_an_interrupted_try_leaves_nothing_in_the_artifact(tmp_path):
    done = run_stage(STAGE, FEW, {}, tmp_path / "a").artifact
    scratch = tmp_path / "b" / "scratch" / f"embedded_data-{done.dir.name}" / "digits_single"
    scratch.mkdir(parents=True)
    (scratch / ".train-00000-of-00001.parquet.1234abcd.tmp").write_bytes(b"half")
    assert tree_digest(run_stage(STAGE, FEW, {}, tmp_path / "b").artifact.dir) == tree_digest(done.dir)
