"""The train and export stages with a trainer that keeps the contract and does no work."""

import json
import re
import shutil
from pathlib import Path

import pytest

from dataset_builders.errors import InputError
from dataset_builders.storage.files import sha256_file
from stages.export import stage as export
from stages.export.stage import ExportConfig, copy_processor_files
from stages.shared.artifacts import verify
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.shared.inputs.model_directory import ModelDirectory, model_input
from stages.shared.launchers.config import ClusterConfig
from stages.shared.launchers.job import LAUNCHERS, JobFailed
from stages.train import stage as train
from stages.train.run_trainer import MetricsFollower, StageStopped, TrainerFailed
from stages.train.stage import make_run_config, read_metrics
from stages.verify.directory import differences
from tests.helpers.fake_trainer import metrics_row, stand_in
from tests.helpers.pages import parse_page
from tests.helpers.run_dir import changed
from tests.helpers.tiers import full
from tests.helpers.tiny_model import tiny_hf_dir
from tests.helpers.trees import tree_digest
from tests.stages.artifacts import stage_artifact
from trainer.contract.checkpoint import write_checkpoint_record
from trainer.contract.names import METRICS_JSONL
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import OptimConfig, PartConfig, ProfileConfig, RunConfig, TrainConfig, TrainerExecution

CONFIG = TrainConfig(
    seed=0,
    num_steps=4,
    global_batch_size=4,
    precision="float32",
    heldout_interval=2,
    optim=OptimConfig(lr=1e-3, min_lr_fraction=0.1, warmup_steps=1, weight_decay=0.0),
)


@pytest.fixture(autouse=True)
def fake_trainer(monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.delenv("FAKE_TRAINER", raising=False)


def training_inputs(directory: Path, hf_dir: Path) -> dict:
    sums = {"num_samples": 12, "num_tokens": 3000, "num_loss_tokens": 500, "num_patches": 4000, "num_images": 10}
    stats = {"num_bins": {"train": 6, "heldout": 1}, "epochs": [{"num_bins": 6, "subsets": {"all": sums}}]}
    planned = {"config": {"seq_len": 512, "pad_multiple": 4}, "stats": stats}
    pixels = {"min_pixels": 2048, "max_pixels": 9216}
    return {
        "model": model_input(ModelDirectory(hf_dir)),
        "tokenized": stage_artifact(directory / "tokenize", "tokenize", stats=pixels),
        "bins": stage_artifact(directory / "plan_bins", "plan_bins", **planned),
    }


@pytest.fixture
def inputs(tmp_path):
    return training_inputs(tmp_path, tiny_hf_dir())


def _run(inputs, root: Path, **resources):
    execution = {name: resources.pop(name) for name in TrainerExecution.model_fields if name in resources}
    resources |= {"trainer": TrainerExecution(**execution)}
    return run_stage(train.STAGE, CONFIG, inputs, root, StageResources(**resources))


def _run_of(artifact: Artifact) -> RunConfig:
    return RunConfig.model_validate_json((artifact.dir / "run.json").read_text())


def test_a_finished_training_is_an_artifact_with_its_figures(inputs, tmp_path):
    lines, rows = [], []
    result = _run(inputs, tmp_path, on_line=lines.append, on_rows=rows.extend)
    stats = result.artifact.manifest.stats
    assert (stats["steps"], stats["loss"], stats["heldout_loss"]) == (4, 0.25, 2.0)
    assert (result.artifact.dir / stats["checkpoint"]).is_dir()
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert "fake trainer train" in lines
    page = parse_page((result.artifact.dir / "report.html").read_text())
    assert len(page.find("img", "curve")) == 4 and "optim.lr" in page.text
    run = _run_of(result.artifact)
    assert run.task == "train" and run.seq_len == 512 and run.train == CONFIG
    assert run.fingerprint == result.artifact.manifest.fingerprint
    assert run.hf_dir == inputs["model"].dir.resolve() and run.bins_dir == inputs["bins"].dir.resolve()
    assert _run(inputs, tmp_path).reused


def test_the_manifest_holds_no_path_no_time_and_no_trace_of_steps(inputs, tmp_path):
    plain = _run(inputs, tmp_path / "a").artifact
    traced = _run(inputs, tmp_path / "b", profile=ProfileConfig(first_step=2)).artifact
    assert _run_of(traced).execution.profile == ProfileConfig(first_step=2)
    manifest = (plain.dir / "manifest.json").read_text()
    assert (traced.dir / "manifest.json").read_text() == manifest
    assert str(tmp_path) not in manifest and "seconds" not in manifest


@pytest.mark.parametrize(
    ("epochs", "fraction", "steps", "warmup"), [(1, 0.5, 3, 1), (2.4, 0.25, 8, 2), (0.01, 0.4, 1, 0)]
)
def test_epochs_and_a_share_of_warmup_are_counted_in_steps(inputs, tmp_path, epochs, fraction, steps, warmup):
    optim = CONFIG.optim.model_copy(update={"warmup_steps": None, "warmup_fraction": fraction})
    config = CONFIG.model_copy(update={"num_steps": None, "num_epochs": epochs, "global_batch_size": 2, "optim": optim})
    run = make_run_config(config, inputs, tmp_path, StageResources()).train
    assert (run.num_steps, run.num_epochs, run.optim.warmup_steps) == (steps, None, warmup)
    assert "num_epochs" not in run.model_dump() and "warmup_fraction" not in run.model_dump()["optim"]


def test_a_warmup_that_is_longer_than_the_epochs_is_refused(inputs, tmp_path):
    config = CONFIG.model_copy(update={"num_steps": None, "num_epochs": 0.1})
    words = r"^train\.optim\.warmup_steps=1 leaves nothing of the 1 steps .*num_epochs=0\.1"
    with pytest.raises(InputError, match=words):
        make_run_config(config, inputs, tmp_path, StageResources())


def test_a_model_that_a_stage_made_lies_in_its_hf_folder(inputs, tmp_path):
    made = stage_artifact(tmp_path / "embedded_model", "embedded_model")
    run = make_run_config(CONFIG, {**inputs, "model": made}, tmp_path, StageResources())
    assert run.hf_dir == made.dir.resolve() / "hf"


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("fail", TrainerFailed, ["loss is nan at step 4", "a/00000001", "trainer.log"]),
        ("stop", StageStopped, ["after step 3", "run the same command again"]),
        ("die", JobFailed, ["exit status", "fake trainer train", "trainer.log"]),
        ("input", InputError, ["hf_dir has no weights"]),
    ],
)
def test_how_a_training_ends_badly_and_that_its_checkpoints_survive(inputs, tmp_path, monkeypatch, how, error, words):
    monkeypatch.setenv("FAKE_TRAINER", how)
    with pytest.raises(error) as caught:
        _run(inputs, tmp_path)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    (scratch,) = (tmp_path / "scratch").glob("train-*/")
    (scratch / "checkpoints" / "step-000002").mkdir(parents=True)
    monkeypatch.delenv("FAKE_TRAINER")
    again = _run(inputs, tmp_path)  # the same directory serves the next try
    assert not again.reused and (again.artifact.dir / "checkpoints" / "step-000002").is_dir()


def test_a_deadline_is_named_although_the_trainer_saved(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_TRAINER", "wait")
    with pytest.raises(StageStopped, match=r"stopped after timeout_seconds=6; .* saved; .*larger execution\.cluster\."):
        _run(inputs, tmp_path, cluster=ClusterConfig(timeout_seconds=6))


def test_an_earlier_answer_is_not_taken_for_this_one(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_TRAINER", "stop")
    with pytest.raises(StageStopped):
        _run(inputs, tmp_path)
    monkeypatch.setenv("FAKE_TRAINER", "die")
    with pytest.raises(JobFailed):
        _run(inputs, tmp_path)


def test_a_training_that_finished_while_nobody_waited_is_not_launched_again(inputs, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    run, rows = make_run_config(CONFIG, inputs, tmp_path / "out", StageResources()), []
    first = train.run_trainer(run, StageResources(), "train")
    monkeypatch.setitem(LAUNCHERS, "torchrun", "no_such_module:Launcher")
    assert train.run_trainer(run, StageResources(on_rows=rows.extend), "train") == first
    assert [row.step for row in rows] == [1, 2, 3, 4]
    with pytest.raises(ModuleNotFoundError):  # another run.json means another job
        train.run_trainer(changed(run, log_interval=2), StageResources(), "train")


def test_a_broken_listener_stops_nothing(inputs, tmp_path):
    def broken(rows):
        raise ConnectionError("no server")

    assert _run(inputs, tmp_path, on_rows=broken).artifact.manifest.stats["steps"] == 4


@pytest.mark.parametrize("is_noticed_late", [full(False), True])
def test_a_finished_training_whose_checkpoint_is_damaged_goes_on(inputs, tmp_path, caplog, is_noticed_late):
    """It is not reused: the trainer resumes from the existing files, and its first line prints where it resumes.
    `is_noticed_late`: a flow that was killed after the trainer's end finds its result and the damage.
    """
    done = _run(inputs, tmp_path).artifact
    checkpoint = done.dir / done.manifest.stats["checkpoint"]
    assert _run(inputs, tmp_path).reused
    if is_noticed_late:
        (done.dir / "manifest.json").unlink()
        done.dir.rename(tmp_path / "scratch" / f"train-{done.dir.name}")
        checkpoint = tmp_path / "scratch" / f"train-{done.dir.name}" / done.manifest.stats["checkpoint"]
    data = (checkpoint / "athanor.json").read_text()
    (checkpoint / "athanor.json").write_text(data.replace('"step": 4', '"step": 5'))
    (checkpoint / "kept").touch()
    lines = []
    again = _run(inputs, tmp_path, on_line=lines.append)
    assert not again.reused and "fake trainer train" in lines and again.artifact.dir == done.dir
    assert (done.dir / done.manifest.stats["checkpoint"] / "kept").is_file()
    told = f"{checkpoint} is damaged (athanor.json is not what was written); the stage continues from the intact files"
    assert is_noticed_late or told in caplog.text
    assert _run(inputs, tmp_path).reused


@pytest.mark.parametrize(
    ("record", "told"),
    [
        full({"step": 2}, r"step-000004 is damaged \(it is the checkpoint of step 2\)"),
        full({"step": 6}, r"step-000004 is damaged \(it is the checkpoint of step 6\)"),
        ({"fingerprint": "e" * 16}, "step-000004 is a checkpoint of another training"),
    ],
)
def test_a_whole_checkpoint_in_the_place_of_another_is_not_exported(inputs, tmp_path, caplog, record, told):
    done = _run(inputs, tmp_path).artifact
    checkpoint = done.dir / done.manifest.stats["checkpoint"]
    (checkpoint / "athanor.json").unlink()
    write_checkpoint_record(checkpoint, {"step": 4, "fingerprint": done.manifest.fingerprint} | record)
    assert not _run(inputs, tmp_path).reused and re.search(told, caplog.text)
    assert _run(inputs, tmp_path).reused


def test_a_damaged_checkpoint_is_told_on_the_terminal(inputs, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("FAKE_TRAINER", "aside")
    _run(inputs, tmp_path)
    (record,) = [record for record in caplog.records if "kept aside" in record.message]
    assert (record.levelname, record.name) == ("WARNING", "athanor.train")
    assert "step-000004 is damaged; it is kept aside as damaged-step-000004" in record.message


def test_follower_hands_on_each_step_once_and_only_whole_lines(tmp_path):
    path, steps = tmp_path / METRICS_JSONL, []
    follower = MetricsFollower(path, lambda rows: steps.extend(row.step for row in rows))
    follower.poll()
    lines = [metrics_row(step).model_dump_json() + "\n" for step in (1, 2, 3)]
    path.write_text(lines[0] + lines[1][:20])
    follower.poll()
    assert steps == [1]
    path.write_text(lines[0] + lines[1] + lines[2])
    follower.poll()
    assert steps == [1, 2, 3]
    path.write_text(lines[0])  # a resumed trainer truncates the file to its checkpoint, then continues
    follower.poll()
    path.write_text(lines[0] + metrics_row(4).model_dump_json() + "\n")
    follower.poll()
    assert steps == [1, 2, 3, 4]


def test_metrics_of_a_directory_are_one_a_step(tmp_path):
    rows = [metrics_row(1), metrics_row(2, loss=9.0), metrics_row(2, loss=8.0)]
    (tmp_path / METRICS_JSONL).write_text("".join(r.model_dump_json() + "\n" for r in rows) + '{"step": 3, "lo')
    assert [(row.step, row.loss) for row in read_metrics(tmp_path)] == [(1, 1.0), (2, 8.0)]


@pytest.mark.parametrize(
    ("processes", "parallel", "words"),
    [
        (3, ParallelConfig(tp=2), "processes=3 is not a multiple of tp=2 x pp=1 x cp=1 = 2; try processes=2"),
        (4, ParallelConfig(tp=4), "parallel.tp=4 does not divide the model's num_kv_heads=2; try execution.parallel."),
        (4, ParallelConfig(cp=4), "plan_bins.pad_multiple=4 is not a multiple of 8"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_anything_is_started(inputs, tmp_path, processes, parallel, words):
    started = []
    with pytest.raises(InputError, match=re.escape(words)):
        _run(inputs, tmp_path, cluster=ClusterConfig(processes=processes), parallel=parallel, on_line=started.append)
    assert not started and not list(tmp_path.glob("scratch/*/run.json"))


def _export(inputs, root: Path) -> Artifact:
    from_train = {"train": _run(inputs, root).artifact, "model": inputs["model"], "tokenized": inputs["tokenized"]}
    return run_stage(export.STAGE, ExportConfig(), from_train, root).artifact


def test_an_export_loads_and_says_the_pixels_it_was_trained_with(inputs, tmp_path):
    made = _export(inputs, tmp_path)
    hf_dir = made.dir / "hf"
    size = json.loads((hf_dir / "preprocessor_config.json").read_text())["size"]
    assert size == {"shortest_edge": 2048, "longest_edge": 9216}
    source = {f.name for f in inputs["model"].dir.iterdir()}
    assert {"tokenizer.json", "chat_template.jinja", "config.json", "model.safetensors"} <= source
    assert {f.name for f in hf_dir.iterdir()} == source
    assert made.manifest.stats["dtype"] == "float32"
    written = {file.name: (file.size_bytes, file.sha256) for file in made.manifest.files}
    assert written == {f"hf/{f.name}": (f.stat().st_size, sha256_file(f)) for f in hf_dir.iterdir()}
    assert {file.name for file in made.dir.iterdir()} == {"hf", "manifest.json", "report.html", "report.json"}


@pytest.mark.parametrize(
    ("eos", "expected"),
    [
        pytest.param(5, [5, 2], id="an id"),
        full([5, 7], [5, 7, 2], id="a list"),
        full([2, 5], [2, 5], id="there already"),
        full(None, [2], id="none"),
        full(2, 2, id="that id"),
        pytest.param(..., [9, 2], id="of config.json"),
    ],
)
def test_an_export_ends_where_the_trained_turns_do(inputs, tmp_path, eos, expected):
    """A base model may end at another token than the turns of its chat template."""
    source = Path(shutil.copytree(tiny_hf_dir(), tmp_path / "source"))
    file, config = source / "generation_config.json", json.loads((source / "config.json").read_text())
    config.pop("eos_token_id", None)
    config["text_config"]["eos_token_id"] = 9
    (source / "config.json").write_text(json.dumps(config))
    if eos is ...:
        file.unlink()
    else:
        file.write_text(json.dumps({"eos_token_id": eos, "do_sample": False}))
    stats = {"min_pixels": 2048, "max_pixels": 9216, "end_of_turn_id": 2}
    tokenized = stage_artifact(tmp_path / "of", "tokenize", stats=stats)
    made = _export({**inputs, "model": model_input(ModelDirectory(source)), "tokenized": tokenized}, tmp_path)
    written = json.loads((made.dir / "hf" / file.name).read_text())
    assert written["eos_token_id"] == expected and (eos is ... or written["do_sample"] is False)
    assert ("added_end" in made.manifest.stats) == (expected != eos)
    assert differences(made.dir / "hf", ModelDirectory(source)) == []


def test_exports_are_byte_identical(inputs, tmp_path):
    assert tree_digest(_export(inputs, tmp_path / "a").dir) == tree_digest(_export(inputs, tmp_path / "b").dir)


def test_weights_are_digested_while_they_are_written(inputs, tmp_path, monkeypatch):
    """The trainer computes the digests in its own process; the stage reads only the small files again."""
    read, original = [], verify.file_entry
    monkeypatch.setattr(verify, "file_entry", lambda folder, name: read.append(name) or original(folder, name))
    files = _export(inputs, tmp_path).manifest.files
    assert {file.name for file in files} - set(read) == {"hf/model.safetensors"} and len(read) > 4


def test_dtype_and_old_pixel_names_are_set_right(tmp_path):
    source, target = tmp_path / "source", tmp_path / "hf"
    shutil.copytree(tiny_hf_dir(), source)
    target.mkdir()
    shutil.copyfile(source / "model.safetensors", target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    (source / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 1, "max_pixels": 2, "patch_size": 16}))
    copy_processor_files(source, target, {"min_pixels": 1024, "max_pixels": 4096})
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    preprocessor = json.loads((target / "preprocessor_config.json").read_text())
    assert preprocessor == {"patch_size": 16, "size": {"shortest_edge": 1024, "longest_edge": 4096}}


def _features(root: Path, inputs, **parents: str) -> Artifact:
    """Return features of the inputs' samples by their model, or by another model."""
    made_of = {role: inputs[role].parent() for role in ("model", "tokenized")}
    made_of |= {role: made_of[role].model_copy(update={"fingerprint": other}) for role, other in parents.items()}
    stats = {"features": {"format_version": 1, "dtype": "bfloat16", "width": 192}}
    return stage_artifact(root, "encode_images", parents=made_of, stats=stats)


FROZEN = CONFIG.model_copy(update=dict.fromkeys(("vision", "merger"), PartConfig(frozen=True)))


def test_features_are_an_input_and_stand_in_run_json(inputs, tmp_path):
    features = _features(tmp_path / "features", inputs)
    made = run_stage(train.STAGE, FROZEN, {**inputs, "features": features}, tmp_path).artifact
    assert _run_of(made).features_dir == features.dir and made.manifest.parents["features"] == features.parent()
    without = run_stage(train.STAGE, FROZEN, inputs, tmp_path).artifact
    assert _run_of(without).features_dir is None
    assert without.manifest.parents.keys() == {"model", "tokenized", "bins"}


@pytest.mark.promise(
    "Training on features that were stored once equals computing them in eleven layouts, losses to 1e-5 and "
    "weights to 2e-6; damaged or foreign features are refused."
)
@pytest.mark.parametrize(
    ("role", "words"),
    [("model", "holds features by the model eeeeeeee"), ("tokenized", "was made of the samples eeeeeeee")],
)
def test_features_of_another_model_or_of_other_samples_are_refused(role, words, inputs, tmp_path):
    features = _features(tmp_path / "features", inputs, **{role: "e" * 16})
    with pytest.raises(InputError, match=words):
        run_stage(train.STAGE, FROZEN, {**inputs, "features": features}, tmp_path)
