"""The whole pipeline with source and root in an object store, whose connections are cut from time to time. Only the
store is faked. The data stages make the same bytes there as on a disk."""

import os
import subprocess
from pathlib import Path

import pytest

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.storage.store import StorePath, location, upload_dir, walk_files
from flows.pipeline.recipe import load_recipe
from stages.convert.stage import STAGE as CONVERT
from stages.embedded_data.digits import STAGE as EMBEDDED_DATA
from stages.embedded_data.digits import EmbeddedDataConfig
from stages.embedded_model.stage import STAGE as EMBEDDED_MODEL
from stages.plan_bins.stage import STAGE as PLAN_BINS
from stages.shared.artifacts.artifact import Artifact, External
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs.model_directory import ModelDirectory, processor_input
from stages.tokenize.stage import STAGE as TOKENIZE
from tests.e2e.command import ATHANOR, athanor, sets
from tests.helpers.object_store import BUCKET, CuttingProxy, environment, moto_server
from tests.helpers.patience import wait_for
from tests.helpers.service import clean_environment

pytestmark = pytest.mark.promise(
    "The data stages write the same bytes from one process, several or a Dask cluster, on a disk or in an object "
    "store whose connections are cut, in any order of completion and after kill -9."
)

STEPS = {"train.num_steps": 8, "train.optim.warmup_steps": 2, "train.heldout_interval": 4}
DATA_STAGES = ("convert", "tokenize", "plan_bins")
ROOT = f"s3://{BUCKET}/athanor"


@pytest.fixture(scope="module")
def proxy():
    with moto_server() as address, CuttingProxy(address) as cutting, environment(cutting.address):
        yield cutting


@pytest.fixture(scope="module")
def raw(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("raw")
    return run_stage(EMBEDDED_DATA, EmbeddedDataConfig(seed=0), {}, root).artifact.dir


def command(data: StorePath) -> list[str]:
    return ["run", "--root", ROOT, *sets({"data": data, **STEPS})]


def make_locally(raw: Path, root: Path) -> None:
    """Make the data stages of the default recipe on a disk."""
    config, source = load_recipe().config, {"raw": External(raw, "raw", "0" * 16)}
    samples = run_stage(CONVERT, config.convert, source, root).artifact
    hf_dir = run_stage(EMBEDDED_MODEL, config.model, {"samples": samples}, root).artifact.dir / "hf"
    inputs = {"samples": samples, "processor": processor_input(ModelDirectory(hf_dir))}
    tokenized = run_stage(TOKENIZE, config.tokenize, inputs, root).artifact
    run_stage(PLAN_BINS, config.plan_bins, {"tokenized": tokenized}, root)


def made_of(root: StorePath) -> dict[str, bytes]:
    """Return file of a data stage -> bytes, without manifests. The raw data's digest is part of all fingerprints, so
    fingerprints in pages are replaced by names."""
    made = [one for stage in (*DATA_STAGES, "embedded_model") for one in (root / "artifacts" / stage).iterdir()]
    names = {directory.name.encode(): directory.parent.name.encode() for directory in made}
    (converted,) = (root / "artifacts" / "convert").iterdir()
    names[Artifact.load(converted).manifest.parents["raw"].fingerprint.encode()] = b"raw"
    files = {}
    for stage in DATA_STAGES:
        folder = root / "artifacts" / stage
        for file in walk_files(folder):
            name = str(file).removeprefix(f"{folder}/").partition("/")[2]
            content = file.read_bytes() if name != MANIFEST else b""
            if name.endswith(".html"):
                for fingerprint, stage_name in names.items():
                    content = content.replace(fingerprint, stage_name)
            files[f"{stage}/{name}"] = content
    return files


@pytest.mark.full
def test_all_of_it_and_again(proxy, raw, tmp_path):
    source = location(f"s3://{BUCKET}/raw")
    upload_dir(raw, source, MANIFEST)
    make_locally(raw, tmp_path / "local")
    cache = {"ATHANOR_CACHE_DIR": str(tmp_path / "cache")}
    _kill_in_convert(command(source), cache)
    proxy.cut_down += [25_000, 60_000, 40_000]
    proxy.cut_up += [30_000, 70_000]
    text = athanor(*command(source), seconds=600, **cache)
    assert proxy.cuts >= 4, "the connection was not cut"
    assert f"Stages, in {ROOT}" in text and "14 of 14 stages made, 0 reused" in text
    assert made_of(tmp_path / "local") == made_of(location(ROOT))
    made = walk_files(location(ROOT) / "artifacts")
    assert not [f for f in made if f.name.endswith((".tmp", ".tar.json", ".lock"))]
    finished = {f.parent.parent.name for f in made if f.name == MANIFEST}
    assert finished >= {"train", "export", "answer", "evaluate", "compare", *DATA_STAGES}
    # simulates another machine: an empty cache, the same store
    again = athanor(*command(source), seconds=600, ATHANOR_CACHE_DIR=str(tmp_path / "other"))
    assert "0 of 14 stages made, 14 reused" in again


def _kill_in_convert(words: list[str], cache: dict[str, str]) -> None:
    """Kill -9 once the first shard is in the store, finished or not."""
    env = {**clean_environment(), **cache}
    process = subprocess.Popen([ATHANOR, *words], env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    converted = location(ROOT) / "artifacts" / "convert"
    wait_for(
        lambda: process.poll() is not None or any(f.name.endswith(".tar") for f in walk_files(converted)), 300, "shard"
    )
    assert process.poll() is None, "the run ended before it could be killed"
    os.killpg(process.pid, 9)
    process.wait()
    (unfinished,) = (location(ROOT) / "artifacts" / "convert").iterdir()
    with pytest.raises(Exception, match="is not a finished artifact"):
        Artifact.load(unfinished)
