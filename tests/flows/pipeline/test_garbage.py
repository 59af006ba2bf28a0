"""`athanor gc` on made roots: what it deletes, what it keeps and for whom, and when it refuses."""

import json
import os
import re
import shutil
import sqlite3
import time
import uuid
from pathlib import Path

import filelock
import pytest
import yaml

from dataset_builders.contracts.manifest import fingerprint
from dataset_builders.storage.files import write_json
from flows.cli.main import main
from flows.libraries.mlflow_private import read_registry
from flows.pipeline import garbage
from flows.pipeline.plan import Plan
from flows.pipeline.recipe import load_recipe
from flows.tracking.record import FLOW_RUN_TAG, SWEEP_TAG, changed, records_dir
from flows.tracking.registry import EVALUATION_TAG, EXPORT_TAG, register, versions_at
from flows.tracking.run_writer import FINGERPRINT
from flows.tracking.servers import mlflow_database
from flows.tracking.store import connect, tracking_uri
from stages.shared.artifacts.artifact import Artifact, stage_identity
from stages.shared.launchers.processes import Owner
from tests.helpers.tracked_run import Nobody, make_artifact, open_tracker
from trainer.contract.checkpoint import write_checkpoint_record

pytestmark = pytest.mark.promise(
    "`athanor gc` keeps what a registered version, a run, a named recipe or unfinished work needs and what it does not "
    "understand, and frees what it says."
)

DAY = 86_400
FLOW_RUNS = "CREATE TABLE flow_run (id, parent_task_run_id, start_time, expected_start_time, state_type)"
CHAIN = ("convert", "tokenize", "plan_bins", "train", "export", "evaluate", "release")


@pytest.fixture(autouse=True)
def nobody_sends(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("PREFECT_HOME")
    monkeypatch.setattr("flows.tracking.tracker.sender_of", lambda root: Nobody())


@pytest.fixture
def root(tmp_path) -> Path:
    """A root whose MLflow is empty."""
    root = tmp_path / "root"
    connect(root)
    (root / ".athanor-root").touch()
    return root


def make(root: Path, stage: str, letter: str, *parents: Artifact, **fields) -> Artifact:
    """Make an artifact whose fingerprint is a letter, sixteen times."""
    named = {f"{each.manifest.stage}{i}": each.parent() for i, each in enumerate(parents)}
    made = make_artifact(root, stage, letter * 16, parents=named, **fields)
    (made.dir / "data").write_bytes(letter.encode() * 1000)
    return made


def make_chain(root: Path, letters: str) -> dict[str, Artifact]:
    """Make a model with all from which it comes, and a letter for each of CHAIN."""
    made: dict[str, Artifact] = {}
    for stage, letter in zip(CHAIN, letters, strict=True):
        made[stage] = make(root, stage, letter, *made.values())
        os.utime(made[stage].dir / "manifest.json", (time.time() - 99 + len(made),) * 2)
    return made


def register_model(root: Path, made: dict[str, Artifact], name: str = "athanor-digits") -> str:
    """Register a model as a version, of which only its run names the evaluation and the release, and return its
    number."""
    client = connect(root)
    tags = {EVALUATION_TAG: made["evaluate"].dir.name, f"{FINGERPRINT}release": made["release"].dir.name}
    run_id = client.create_run("0", tags=tags).info.run_id
    model = client.create_logged_model("0", source_run_id=run_id)
    tags = {EXPORT_TAG: made["export"].dir.name}
    return str(register(client, name, model.artifact_location, run_id, model.model_id, tags).version)


def artifacts_of(root: Path) -> str:
    """Return the letters of the artifacts that are there."""
    return "".join(sorted(path.name[0] for path in root.glob("artifacts/*/*")))


def bytes_of(root: Path) -> int:
    files = {(path.lstat().st_ino, path.lstat().st_size) for path in root.rglob("*") if not path.is_dir()}
    return sum(size for _, size in files)


def gc(root: Path, *arguments: str) -> int:
    return main(["gc", "--root", str(root), *arguments])


def make_old(path: Path, days: float) -> None:
    for each in (path, *path.rglob("*")):
        os.utime(each, (time.time() - days * DAY,) * 2)


def refusal(root: Path, capsys: pytest.CaptureFixture, *arguments: str) -> str:
    """Return the line with which the command refuses, which must be one and delete nothing."""
    before = sorted(root.rglob("*"))
    assert gc(root, "--delete", *arguments) == 2
    assert {path for path in before if not path.exists()} == set()
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_version_keeps_all_it_was_made_from_and_the_rest_goes_if_told(root, capsys, monkeypatch):
    first = make_chain(root, "0123456")
    second = {stage: made for stage, made in first.items() if stage in ("convert", "tokenize", "plan_bins")}
    for stage, letter in zip(CHAIN[3:], "789a", strict=True):
        second[stage] = make(root, stage, letter, *second.values())
    register_model(root, first)
    connect(root).set_registered_model_alias("athanor-digits", "champion", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri(root))  # that of its own service, as it were
    assert gc(root) == 0
    printed = capsys.readouterr().out
    assert printed.count("athanor-digits version 1") == 1
    assert re.search(r"athanor-digits version 1 \(champion\) +7 ", printed)
    assert "artifacts/train/7777777777777777" in printed and "0000" not in printed
    assert artifacts_of(root) == "0123456789a"
    before = bytes_of(root)
    assert gc(root, "--delete") == 0
    said = capsys.readouterr().out
    assert artifacts_of(root) == "0123456"
    assert said.count("deleted artifacts/") == 4
    assert f"freed {(before - bytes_of(root)) / 1000:.3g} kB" in said
    assert said.index("release/a") < said.index("evaluate/9") < said.index("train/7"), "what was made last goes first"
    assert gc(root, "--delete") == 0 and "nothing can be deleted" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["own", "other"])
def test_a_version_keeps_what_only_its_run_names(root, tmp_path, where, monkeypatch, capsys):
    if where == "other":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
    made = make_chain(root, "0123456")
    make(root, "answer", "8", make(root, "compare", "7", made["evaluate"]))
    register_model(root, made)
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == "0123456"
    assert re.search(r"athanor-digits version 1 +7 ", capsys.readouterr().out)


def test_a_version_that_was_deleted_keeps_nothing(root):
    register_model(root, make_chain(root, "0123456"))
    connect(root).delete_model_version("athanor-digits", "1")
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == ""


def test_the_tables_say_what_mlflow_says(root):
    made = make_chain(root, "0123456")
    for name in ("athanor-a", "athanor-a", "athanor-b"):
        register_model(root, made, name)
    client = connect(root)
    client.set_registered_model_alias("athanor-a", "candidate", "2")
    client.delete_model_version("athanor-a", "1")
    versions, run_ids = read_registry(mlflow_database(root), 1.0)
    others, has_run = versions_at(tracking_uri(root))

    def told(found):
        return {(v.name, v.number, v.aliases, frozenset(filter(None, v.texts))) for v in found}

    assert {(each[0], each[1]) for each in told(versions)} == {("athanor-a", 2), ("athanor-b", 1)}
    places = {each.texts[1] for each in versions}  # an address that the client does not tell
    assert {(*each[:3], each[3] - places) for each in told(versions)} == {
        (*each[:3], each[3] - places) for each in told(others)
    }
    assert len(run_ids) == 3 and all(map(has_run, run_ids)) and not has_run("0" * 32)


def test_a_run_keeps_its_artifacts_until_mlflow_holds_it(root, capsys):
    tracker = open_tracker(root, "run")
    tracker.log_stage(make(root, "train", "1", make(root, "convert", "0")))
    make(root, "convert", "2")
    assert "and what it still needs is unknown" in refusal(root, capsys)  # its recipe is one of a test
    tracker.finish("FAILED")
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == "01"
    assert "until `athanor sync` has sent it" in capsys.readouterr().out
    with changed(root, "run") as record:
        record.learnt.published = record.revision + 1
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == "01"
    assert "run embedded, of the last 7 days" in capsys.readouterr().out
    assert gc(root, "--delete", "--days", "0") == 0
    assert artifacts_of(root) == ""


def ended_run(root: Path, key: str, flow_run: str, *stages: Artifact, **tags: str) -> None:
    """Write the record of a run of the recipe embedded, which was stopped a month ago and which MLflow has."""
    tracker = open_tracker(root, key)
    for stage in stages:
        tracker.log_stage(stage)
    tracker.finish("KILLED")
    with changed(root, key) as record:
        config = Plan.open(load_recipe("embedded"), root).config
        record.opening.recipe_yaml = yaml.safe_dump(config.model_dump(mode="json"))
        record.opening.tags |= {FLOW_RUN_TAG: flow_run, **tags}
        record.learnt.published = record.revision + 1
    path = records_dir(root) / f"{key}.json"
    write_json(path, json.loads(path.read_text()) | {"changed_ms": 1})


@pytest.mark.parametrize(("state", "stays"), [("PAUSED", "01"), ("SCHEDULED", "01"), ("CANCELLED", "")])
def test_a_suspended_run_keeps_its_artifacts_until_it_ends(root, state, stays, capsys):
    flow_run = str(uuid.uuid4())
    ended_run(root, "run", flow_run, make(root, "train", "1", make(root, "convert", "0")))
    make(root, "convert", "2")
    (root / "prefect").mkdir()
    with sqlite3.connect(root / "prefect" / "prefect.db") as database:
        database.execute(FLOW_RUNS)
        database.execute("INSERT INTO flow_run VALUES (?, NULL, '2026-01-01', '2026-01-01', ?)", (flow_run, state))
        later = "INSERT INTO flow_run VALUES (?, NULL, NULL, '2999-01-01', 'SCHEDULED')"
        database.execute(later, (str(uuid.uuid4()),))
    assert gc(root, "--delete", "--days", "0") == 0
    assert artifacts_of(root) == stays
    assert ("which waits in Prefect" in capsys.readouterr().out) == bool(stays)


@pytest.mark.parametrize(("start", "state"), [("2026-01-01", "PAUSED"), (None, "SCHEDULED"), (None, "PENDING")])
def test_a_waiting_run_without_a_record_may_need_anything(root, start, state, capsys):
    make(root, "convert", "0")
    work = work_of(root, "1", 30, make(root, "plan_bins", "1"))
    (root / "prefect").mkdir()
    with sqlite3.connect(root / "prefect" / "prefect.db") as database:
        database.execute(FLOW_RUNS)
        values = (str(uuid.uuid4()), None, start, "2026-01-01", state)
        database.execute("INSERT INTO flow_run VALUES (?, ?, ?, ?, ?)", values)
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == "01" and work.is_dir()
    assert "which waits in Prefect and may need any artifact" in capsys.readouterr().out


def test_a_sweep_that_goes_on_keeps_the_artifacts_of_its_finished_runs(root):
    sweep = {SWEEP_TAG: "embedded by train.seed 01234567"}
    ended_run(root, "first", "", make(root, "train", "1"), **sweep)
    ended_run(root, "other", "", make(root, "train", "2"), **{SWEEP_TAG: "another"})
    ended_run(root, "second", "", **sweep)
    with changed(root, "second") as record:
        record.status = None
    assert gc(root, "--delete", "--days", "0") == 0
    assert artifacts_of(root) == "1"


def test_a_run_of_another_mlflow_keeps_its_artifacts(root):
    tracker = open_tracker(root, "run")  # whose model a person may have registered there
    for made in make_chain(root, "0123456").values():
        tracker.log_stage(made)
    tracker.finish("FINISHED")
    with changed(root, "run") as record:
        record.learnt.published, record.learnt.run_id = record.revision + 1, "f" * 32
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == "0123456"


@pytest.mark.parametrize("who", ["recipe", "run"])
def test_what_a_recipe_or_a_run_that_goes_on_would_reuse_stays(root, who):
    plan = Plan.open(load_recipe("embedded"), root)
    step = plan.steps[0]
    identity = stage_identity(step.stage, step.config, {})
    name = fingerprint(identity)
    make_artifact(root, step.stage.name, name)
    make(root, "convert", "0")
    if who == "run":
        open_tracker(root, "run")
        with changed(root, "run") as record:
            record.opening.recipe_yaml = yaml.safe_dump(plan.config.model_dump(mode="json"))
    assert gc(root, "--delete", *(["--keep", "embedded"] if who == "recipe" else [])) == 0
    assert [path.name for path in root.glob("artifacts/*/*")] == [name]
    if who == "recipe":
        (other := root.with_name("other.yaml")).write_text(yaml.safe_dump(plan.config.model_dump(mode="json")))
        other.write_text(other.read_text().replace("seed: 0", "seed: 1"))
        assert gc(root, "--delete", "--keep", "embedded", "--keep", str(other)) == 0
        assert [path.name for path in root.glob("artifacts/*/*")] == [name], "each --keep adds recipes"
    if who == "recipe":  # which is not needed without being named
        assert gc(root, "--delete") == 0
        assert artifacts_of(root) == ""


def test_a_flow_run_without_a_record_may_need_anything(root):
    make(root, "convert", "0")
    path = root / "service" / "runs" / "1.json"
    path.parent.mkdir(parents=True)
    owner = Owner.of_this_process().model_dump()
    write_json(path, {"format_version": 1, "flow_run_id": "1", **owner, "tracking_run": None})
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == "0"
    write_json(path, {"format_version": 1, "flow_run_id": "1", **owner, "pid_started": 1.0})
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == ""


def work_of(root: Path, letter: str, days: float, parent: Artifact) -> Path:
    work = root / "scratch" / f"train-{letter * 16}"
    work.mkdir(parents=True)
    (work / "half").write_text("x")
    write_json(parents := work.with_name(f"{work.name}.parents.json"), {"bins": parent.parent().digest})
    for path in (work, parents):
        make_old(path, days)
    return work


def test_unfinished_work_goes_a_week_after_its_last_write(root, capsys):
    young, old = (
        work_of(root, letter, days, make(root, "plan_bins", letter)) for letter, days in (("1", 6.9), ("2", 7.1))
    )
    assert gc(root, "--delete") == 0
    assert young.is_dir() and artifacts_of(root) == "1", "it keeps what it is made from"
    assert not list(root.glob("scratch/train-2*.json")) and not old.exists()
    assert "nothing was written for 7.1 days" in capsys.readouterr().out
    assert gc(root, "--delete", "--days", "6") == 0
    assert not young.exists() and artifacts_of(root) == ""


def test_an_empty_work_directory_goes_too(root):
    (work := root / "scratch" / f"train-{'1' * 16}").mkdir(parents=True)
    make_old(work, 30)
    assert gc(root, "--delete") == 0 and not work.exists()


def test_an_old_artifact_in_which_work_continues_is_young(root):
    work = work_of(root, "1", 30, make(root, "plan_bins", "1"))
    work.with_name(f"{work.name}.parents.json").touch()
    assert gc(root, "--delete") == 0
    assert work.is_dir() and artifacts_of(root) == "1"


@pytest.mark.parametrize("how", ["lock", "job"])
def test_what_a_process_makes_stays_however_old(root, how, monkeypatch):
    work = work_of(root, "1", 30, make(root, "plan_bins", "1"))
    lock = filelock.FileLock(work.with_name(f"{work.name}.lock"))
    if how == "job":
        monkeypatch.setattr(garbage, "running_jobs", lambda: {f"{work}/job"})
        assert gc(root, "--delete") == 0
    else:
        with lock:
            assert gc(root, "--delete") == 0
    assert work.is_dir() and artifacts_of(root) == "1"


def test_an_artifact_that_is_made_again_meanwhile_stays(root, capsys):
    made = make(root, "convert", "1")
    (root / "scratch").mkdir()
    with filelock.FileLock(root / "scratch" / f"convert-{made.dir.name}.lock"):
        assert gc(root, "--delete") == 1
    assert "a process works there" in capsys.readouterr().out and artifacts_of(root) == "1"


def test_a_run_that_begins_meanwhile_ends_the_deletion(root, capsys, monkeypatch):
    for letter in "12":
        make(root, "convert", letter)
    remove = shutil.rmtree

    def remove_and_begin(path):
        remove(path)
        open_tracker(root, "new")

    monkeypatch.setattr(garbage.shutil, "rmtree", remove_and_begin)
    assert gc(root, "--delete") == 1
    assert "a run has begun, so 1 of 2 stay" in capsys.readouterr().out and len(artifacts_of(root)) == 1


def test_a_run_that_begins_and_ends_meanwhile_ends_the_deletion_too(root, capsys, monkeypatch):
    made = [make(root, "convert", letter) for letter in "12"]
    ended_run(root, "again", "")
    remove = shutil.rmtree

    def remove_and_run(path):
        remove(path)
        tracker = open_tracker(root, "again")
        tracker.log_stage(made[0])
        tracker.finish("FINISHED")
        with changed(root, "again") as record:
            record.learnt.published = record.revision + 1

    monkeypatch.setattr(garbage.shutil, "rmtree", remove_and_run)
    assert gc(root, "--delete", "--days", "0") == 1
    assert "a run has begun, so 1 of 2 stay" in capsys.readouterr().out and artifacts_of(root) == "1"


@pytest.mark.parametrize("name", ["artifacts", "artifacts/train"])
def test_what_is_behind_a_link_keeps_what_it_was_made_from(root, tmp_path, name, capsys):
    chain: dict[str, Artifact] = {}
    for stage, letter in zip(CHAIN, "0123456", strict=True):
        chain[stage] = make(root, stage, letter, *[*chain.values()][-1:])
    register_model(root, chain)
    make(root, "train", "7")
    (root / "scratch").mkdir()
    digests = root / "scratch" / f"train-{'3' * 16}.whole.json"
    digests.write_text("{}")
    (root / name).rename(tmp_path / "moved")
    (root / name).symlink_to(tmp_path / "moved")
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == "01234567" and digests.exists()
    assert re.search(rf"{name} +a link, which is not followed", capsys.readouterr().out)


def test_what_cannot_be_written_is_left_with_the_reason(root, capsys, monkeypatch):
    make(root, "convert", "1")

    def refuse(lock, **_):
        raise PermissionError(13, "Permission denied", lock.lock_file)

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert gc(root, "--delete") == 1
    assert re.search("left artifacts/convert/1+: .*Permission denied", capsys.readouterr().out)


def test_work_that_is_published_meanwhile_is_no_error(root, monkeypatch):
    work = work_of(root, "1", 30, make(root, "plan_bins", "1"))
    monkeypatch.setattr(garbage, "running_jobs", lambda: work.rename(root / "published") and set())
    assert gc(root) == 0


def test_links_and_what_is_not_understood_are_named_and_stay(root, tmp_path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    parent = make(root, "convert", "1")
    moved = make(root, "tokenize", "2", parent).dir.rename(outside / "moved")
    (root / "artifacts" / "tokenize" / ("2" * 16)).symlink_to(moved)
    gone = make(root, "answer", "3")
    (gone.dir / "link").symlink_to(outside)
    make(root, "evaluate", "4").dir.rename(root / "artifacts" / "evaluate" / ("5" * 16))
    damaged = make(root, "compare", "6").dir / "manifest.json"
    damaged.write_text("{")
    for name in ("notes.txt", "artifacts/evaluate/mine", "scratch/mine"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("mine")
    assert gc(root, "--delete") == 0
    printed = capsys.readouterr().out
    assert (outside / "mine").exists() and moved.is_dir() and not gone.dir.exists()
    assert artifacts_of(root) == "1256m"
    names = ("notes.txt", "evaluate/mine", "scratch/mine", "tokenize/2222", "evaluate/5555", "compare/6666")
    assert all(name in printed for name in names)


def test_a_hard_link_elsewhere_frees_nothing(root, capsys):
    made = make(root, "release", "1")
    (root / "mlflow-artifacts").mkdir(exist_ok=True)
    for path in [path for path in made.dir.iterdir() if path.name != "data"]:
        os.link(path, root / "mlflow-artifacts" / path.name)
    assert gc(root) == 0
    assert "1 kB would be free" in capsys.readouterr().out


def test_what_killed_processes_left_goes(root, capsys):
    make(root, "convert", "1").dir.rename(root / "artifacts" / "convert" / f"deleting-{'1' * 16}")
    (root / "scratch" / "deleting-train-1111111111111111").mkdir(parents=True)
    others = ("scratch/.train-1.parents.json.0123abcd.tmp", f"scratch/answer-{'2' * 16}.whole.json")
    for name in others:
        (root / name).write_text("{")
    assert gc(root, "--delete") == 0
    assert all((root / name).exists() for name in others) and len(list(root.glob("scratch/*"))) == 2
    assert artifacts_of(root) == "" and "Not understood" not in capsys.readouterr().out


def released_checkpoints(root: Path, settings: dict) -> Path:
    """Return the directory of the checkpoints of steps 3, 6 and 9, the last of which was exported and registered."""
    made = make_chain(root, "0123456")
    training = make(root, "train", "3", made["plan_bins"], stats={"checkpoint": "checkpoints/step-000009"})
    make(root, "release", "6", training, made["export"], made["evaluate"])
    register_model(root, made)
    write_json(training.dir / "run.json", {"execution": {"checkpoint": settings}})
    checkpoints = training.dir / "checkpoints"
    for step in (3, 6, 9):
        (checkpoints / f"step-00000{step}").mkdir(parents=True)
        write_checkpoint_record(checkpoints / f"step-00000{step}", {"step": step})
    return checkpoints


def test_checkpoints_that_are_still_to_be_sent_stay(root):
    checkpoints = released_checkpoints(root, {})
    tracker = open_tracker(root, "run")
    tracker.log_stage(Artifact.load(checkpoints.parent))
    tracker.finish("FINISHED")
    assert gc(root, "--delete") == 0
    assert len(list(checkpoints.iterdir())) == 3
    with changed(root, "run") as record:
        record.learnt.published = record.revision + 1
    assert gc(root, "--delete") == 0
    assert len(list(checkpoints.iterdir())) == 1


@pytest.mark.parametrize("other", ["waits", "goes on", "cannot be read", "is sent", "shares nothing"])
def test_a_run_that_ends_keeps_the_checkpoints_that_another_is_still_to_send(root, other):
    checkpoints = released_checkpoints(root, {})
    training = Artifact.load(checkpoints.parent)
    tracker = open_tracker(root, "other")
    tracker.log_stage(make(root, "train", "9") if other == "shares nothing" else training)
    if other in ("waits", "is sent"):
        tracker.finish("FINISHED")
    if other == "cannot be read":
        (records_dir(root) / "other.json").write_text(f'{{"stages": "{training.dir.name}')
    elif other != "waits":
        with changed(root, "other") as record:
            record.learnt.published = record.revision + 1
    garbage.prune_released(root, training)
    left = [1, 3][other in ("waits", "goes on", "cannot be read")]
    assert len(list(checkpoints.iterdir())) == left


@pytest.mark.parametrize(("settings", "left"), [({}, [9]), ({"keep_released": 2}, [6, 9]), ({"keep_every": 6}, [6, 9])])
def test_a_released_training_keeps_the_checkpoints_that_its_settings_say(root, settings, left, capsys):
    checkpoints = released_checkpoints(root, settings)
    for name in ("saving-step-000006", "damaged-step-000003"):
        (checkpoints / name).mkdir()
    assert gc(root, "--delete") == 0
    there = sorted(path.name for path in checkpoints.iterdir())
    assert there == ["damaged-step-000003", *(f"step-00000{step}" for step in left)]
    assert "damaged-step-000003" in capsys.readouterr().out
    (checkpoints / "step-000003").mkdir()
    write_checkpoint_record(checkpoints / "step-000003", {"step": 3})
    (checkpoints / "step-000009" / "athanor.json").write_text("{}")
    assert gc(root, "--delete") == 0
    assert (checkpoints / "step-000003").is_dir(), "the one that was exported is damaged"
    assert "not pruned" in capsys.readouterr().out


def test_an_unreleased_training_keeps_its_checkpoints(root):
    made = make_chain(root, "0123456")
    register_model(root, made)
    shutil.rmtree(made["release"].dir)
    write_json(made["train"].dir / "run.json", {"execution": {"checkpoint": {}}})
    for step in (3, 6):
        (path := made["train"].dir / "checkpoints" / f"step-00000{step}").mkdir(parents=True)
        write_checkpoint_record(path, {"step": step})
    assert gc(root, "--delete") == 0
    assert len(list((made["train"].dir / "checkpoints").iterdir())) == 2


def test_a_needed_artifact_with_a_damaged_manifest_keeps_everything(root, capsys):
    made = make_chain(root, "0123456")
    register_model(root, made)
    make(root, "convert", "7")
    (made["train"].dir / "manifest.json").write_text("{}")
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == "01234567"
    assert re.search(r"version 1 +8 .* damaged; all stays while something needs it", capsys.readouterr().out, re.S)
    connect(root).delete_model_version("athanor-digits", "1")
    assert gc(root, "--delete") == 0
    assert artifacts_of(root) == "3"


def test_it_refuses_in_one_line_where_it_cannot_know(root, capsys, monkeypatch, tmp_path):
    made = make_chain(root, "0123456")
    register_model(root, made)
    database = mlflow_database(root)
    whole = database.read_bytes()
    with sqlite3.connect(database) as connection:
        connection.execute("DROP TABLE model_version_tags")
    assert f"{database} cannot be read (no such table" in refusal(root, capsys)
    database.write_bytes(whole[:5000])
    assert "is no whole SQLite database" in refusal(root, capsys)
    database.unlink()
    assert f"{database} is missing, so it is unknown which models are registered" in refusal(root, capsys)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert "MLFLOW_TRACKING_URI=http://127.0.0.1:9 cannot be read (" in refusal(root, capsys)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    database.write_bytes(whole)
    (root / "prefect").mkdir()
    with sqlite3.connect(root / "prefect" / "prefect.db") as prefect:
        prefect.execute("CREATE TABLE flow_run (id)")
    assert f"Prefect at {root}/prefect/prefect.db cannot be read (no such column" in refusal(root, capsys)
    shutil.rmtree(root / "prefect")
    assert "--keep nope: there is no recipe 'nope'" in refusal(root, capsys, "--keep", "nope")
    assert "no .athanor-root" in refusal(tmp_path, capsys)
