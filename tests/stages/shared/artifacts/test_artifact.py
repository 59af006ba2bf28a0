"""run_stage in a directory and in an object store: reuse, resume, lock, and the manifest published last."""

import json
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import filelock
import fsspec
import pytest
from pydantic import BaseModel

from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.contracts.shard_io import ShardWriter, finished_shard
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from dataset_builders.storage.store import StorePath, location, remove_tree, side_dir, walk_files
from stages.shared.artifacts.artifact import (
    Artifact,
    External,
    Stage,
    StageOutput,
    StageResult,
    artifact_dir,
    stage_identity,
)
from stages.shared.artifacts.run_stage import check_places, run_stage, why_rebuild
from tests.helpers.patience import at_most


class Config(BaseModel):
    value: int = 1


class Failure(Exception):
    pass


@pytest.fixture(params=["disk", "store"])
def root(request, tmp_path, monkeypatch) -> StorePath:
    monkeypatch.setenv("ATHANOR_CACHE_DIR", str(tmp_path / "cache"))
    if request.param == "disk":
        return tmp_path / "root"
    fsspec.filesystem("memory").store.clear()
    return location("memory://bucket/root")


def shards(work: StorePath, fail_at: int | None = None) -> StageOutput:
    """Write three shards; raise before writing shard number `fail_at`."""
    entries, written = [], []
    for i in range(3):
        name = f"train/shard-{i:05d}.tar"
        done = finished_shard(work, name)
        if done is None:
            if i == fail_at:
                raise Failure
            with ShardWriter(work, name) as writer:
                writer.write(f"s/{i:08d}", {"json": b"{}"})
                done = writer.commit("train")
            written.append(i)
        entries.append(done)
    return StageOutput(shards=entries, stats={"written": written})


def stage(fail_at: int | None = None, on_disk: bool = False) -> Stage:
    return Stage("shards", 1, lambda config, inputs, work, resources: shards(work, fail_at), on_disk)


def names(path: StorePath) -> list[str]:
    return sorted(str(file)[len(str(path)) + 1 :] for file in walk_files(path))


@pytest.mark.parametrize("on_disk", [False, True])
def test_made_once_then_reused(root, on_disk):
    made = run_stage(stage(on_disk=on_disk), Config(), {}, root)
    again = run_stage(stage(on_disk=on_disk), Config(), {}, root)
    assert not made.reused and again.reused and again.artifact.manifest == made.artifact.manifest
    assert names(made.artifact.dir) == [MANIFEST, "report.html", *(f"train/shard-0000{i}.tar" for i in range(3))]
    assert not [f for f in (side_dir(root) / "scratch").iterdir() if f.is_dir()], "nothing is left in scratch"


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_finished_is_not_made_again(root, on_disk):
    with pytest.raises(Failure):
        run_stage(stage(2, on_disk), Config(), {}, root)
    identity = stage_identity(stage(), Config(), {})
    assert "unfinished" in why_rebuild(root, stage(on_disk=on_disk), identity)
    made = run_stage(stage(None, on_disk), Config(), {}, root)
    assert made.artifact.manifest.stats == {"written": [2]} and len(made.artifact.manifest.shards) == 3


@pytest.mark.parametrize(
    ("name", "is_directory"),
    [
        ("artifacts", False),
        ("artifacts/shards", False),
        ("artifacts/shards/0123456789abcdef", False),
        ("scratch", False),
        ("scratch/shards-0123456789abcdef", False),
        ("scratch/shards-0123456789abcdef.lock", True),
        ("scratch/shards-0123456789abcdef.whole.json", True),
    ],
)
def test_what_is_in_the_way_of_a_stage_is_named_before_any_stage_works(tmp_path, name, is_directory):
    for fine in ("artifacts/other", "scratch/other-0123456789abcdef.lock", "artifacts/shards/notes"):
        (tmp_path / fine).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / fine).touch()
    run_stage(stage(), Config(), {}, tmp_path)
    check_places(tmp_path, {"shards"})
    path = tmp_path / name
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True) if is_directory else path.touch()
    with pytest.raises(InputError, match=f"^{path} is (not )?a directory, and (a file|one) is needed there; move it"):
        check_places(tmp_path, {"shards"})


def chain(root: StorePath, weights: str, fail_at: int | None = None) -> list[StageResult]:
    """Return the results of three stages, each the input of the next. `weights` are written by the first alone, like
    those of a training that gives other bytes each time. The second writes shards, and raises before `fail_at`."""
    train = Stage("train", 1, lambda config, inputs, work, resources: StageOutput(stats={"weights": weights}))
    inputs = {"base": External(side_dir(root), "hf_dir", "d" * 16)}
    results = [run_stage(train, Config(), inputs, root)]
    for each in (stage(fail_at), replace(stage(), name="scores")):
        results.append(run_stage(each, Config(), {"made": results[-1].artifact}, root))
    return results


def test_what_was_made_from_another_input_of_the_same_fingerprint_is_made_again(root, caplog):
    first = chain(root, "a")
    assert all(result.reused for result in chain(root, "a"))
    remove_tree(first[0].artifact.dir)
    assert [result.reused for result in chain(root, "a")] == [False, True, True]  # the same bytes again
    remove_tree(first[0].artifact.dir)
    second = chain(root, "b")
    assert not any(result.reused for result in second)
    assert "was made from inputs (made) that were made again" in caplog.text
    assert [r.artifact.dir for r in second] == [r.artifact.dir for r in first]
    assert second[1].artifact.manifest.stats == {"written": [0, 1, 2]}
    assert all(result.reused for result in chain(root, "b"))


def test_unfinished_work_from_another_input_is_removed(root):
    with pytest.raises(Failure):
        chain(root, "a", fail_at=2)
    with pytest.raises(Failure):
        chain(root, "a", fail_at=2)
    trained = next((root / "artifacts" / "train").iterdir())
    remove_tree(trained)
    assert chain(root, "b")[1].artifact.manifest.stats == {"written": [0, 1, 2]}


def test_an_input_swapped_for_that_of_another_root_is_noticed(tmp_path):
    ours, theirs = (chain(tmp_path / name, name)[0].artifact.dir for name in ("a", "b"))
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    assert [result.reused for result in chain(tmp_path / "a", "a")] == [True, False, False]


def test_a_fingerprint_does_not_depend_on_the_bytes_of_an_input(tmp_path):
    trained = chain(tmp_path, "a")[0].artifact
    identity = stage_identity(stage(), Config(), {"made": trained})
    assert identity["parents"] == {"made": {"name": "train", "fingerprint": trained.manifest.fingerprint}}


def contents(made: Artifact, inputs) -> str:
    return f"<{made.manifest.fingerprint} of {len(made.manifest.shards)} shards from {sorted(inputs)}>"


def test_a_page_has_the_stages_contents_and_contents_that_fail_cost_only_themselves(root, caplog):
    made = run_stage(replace(stage(), contents=f"{__name__}:contents"), Config(), {}, root).artifact
    page = (made.dir / "report.html").read_text()
    assert f"&lt;{made.manifest.fingerprint} of 3 shards from []&gt;" in page and "train/shard-00002.tar" in page
    without = run_stage(replace(stage(), contents=f"{__name__}:nothing"), Config(value=3), {}, root).artifact
    assert without.manifest.shards == made.manifest.shards and "has no samples (AttributeError" in caplog.text
    page = (without.dir / "report.html").read_text()
    assert "train/shard-00002.tar" in page and "<script" not in page
    assert without.shown_files() == made.shown_files() == [MANIFEST, "report.html"]


def test_another_parent_version_or_config_is_another_artifact(tmp_path):
    parents = [{"data": External(tmp_path, "data", digest)} for digest in ("a", "b")]
    runs = [(stage(), Config(), parents[0]), (stage(), Config(), parents[1]), (stage(), Config(value=2), parents[0])]
    runs += [(replace(stage(), version=2), Config(), parents[0]), (stage(), Config(), {})]
    made = [run_stage(*run, tmp_path / "root") for run in runs]
    assert not any(result.reused for result in made)
    assert len({result.artifact.dir for result in made}) == len(runs)


def test_why_it_is_made_again_is_told_against_the_nearest(root):
    identity = stage_identity(stage(), Config(value=2), {})
    assert why_rebuild(root, stage(), identity) == "never made in this root"
    run_stage(stage(), Config(), {}, root)
    newest = run_stage(replace(stage(), version=3), Config(value=3), {}, root).artifact.dir
    assert why_rebuild(root, stage(), identity) == "value: 1 -> 2"
    (newest / "manifest.json").write_text("{")
    assert why_rebuild(root, stage(), identity) == "value: 1 -> 2"


def test_the_manifest_comes_last(tmp_path, monkeypatch):
    monkeypatch.setenv("ATHANOR_CACHE_DIR", str(tmp_path / "cache"))
    order: list[str] = []
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    put = memory.put_file
    for on_disk in (False, True):
        root = location(f"memory://b/{on_disk}")
        order.clear()
        monkeypatch.setattr(root.fs, "put_file", lambda here, there, **k: order.append(there) or put(here, there, **k))
        run_stage(stage(on_disk=on_disk), Config(), {}, root)
        assert order[-1].endswith(MANIFEST) and sum(name.endswith(MANIFEST) for name in order) == 1


@pytest.fixture
def quick_polls(monkeypatch) -> None:
    monkeypatch.setattr("stages.shared.artifacts.run_stage.LOCK_POLL_SECONDS", 0.02)


_HOLD = """
import sys, time
from pathlib import Path
from tests.stages.shared.artifacts.test_artifact import Config, shards
from stages.shared.artifacts.artifact import Stage
from stages.shared.artifacts.run_stage import run_stage
def run(config, inputs, work, resources):
    print("working", flush=True); time.sleep(60)
run_stage(Stage("shards", 1, run), Config(), {}, Path(sys.argv[1]))
"""


def test_the_second_of_two_waits_and_says_for_whom(tmp_path, caplog, quick_polls):
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4])
    assert holder.stdout.readline() == "working\n"
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(run_stage, stage(), Config(), {}, tmp_path)
        while not caplog.records:
            assert not waits.done()
        assert f"is being made by process {holder.pid} on " in caplog.text
        holder.kill()
        holder.wait()
        assert len(waits.result(30).artifact.manifest.shards) == 3 and not waits.result().reused


@pytest.mark.parametrize("text", ["", '{"pid": 1', "[]"])
def test_a_second_run_waits_for_an_owner_that_cannot_be_read(text, tmp_path, caplog, quick_polls):
    """The owner may be writing its name, or may have been killed while it wrote it."""
    fingerprint = artifact_dir(tmp_path, stage(), stage_identity(stage(), Config(), {})).name
    beside = tmp_path / "scratch" / f"shards-{fingerprint}"
    beside.parent.mkdir()
    beside.with_name(f"{beside.name}.owner.json").write_text(text)
    with ThreadPoolExecutor(1) as pool:
        with filelock.FileLock(f"{beside}.lock"):
            waits = pool.submit(run_stage, stage(), Config(), {}, tmp_path)
            while not caplog.records:
                assert not waits.done(), waits.result()
        assert len(waits.result(30).artifact.manifest.shards) == 3
    assert "is being made by process ? on ?" in caplog.text


def test_what_the_first_has_made_the_second_uses(tmp_path, quick_polls):
    working, go_on, tries = threading.Event(), threading.Event(), []

    def slow(config, inputs, work, resources):
        tries.append(1)
        working.set()
        assert go_on.wait(at_most(30))
        return stage().run(config, inputs, work, resources)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run_stage, Stage("shards", 1, slow), Config(), {}, tmp_path)
        assert working.wait(at_most(30))
        second = pool.submit(run_stage, Stage("shards", 1, slow), Config(), {}, tmp_path)
        time.sleep(0.1)
        go_on.set()
        assert not first.result(30).reused and second.result(30).reused
    assert len(tries) == 1


def test_an_artifact_of_another_format_says_what_to_do(root):
    made = run_stage(stage(), Config(), {}, root).artifact
    raw = json.loads((made.dir / MANIFEST).read_text()) | {"format_version": 0}
    write_text(made.dir / MANIFEST, json.dumps(raw))
    line = r"format_version is 0, this code reads .*; delete .* run the shards stage again"
    with pytest.raises(InputError, match=line):
        run_stage(stage(), Config(), {}, root)
