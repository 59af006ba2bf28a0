"""`athanor` as a user types it: the whole flow on little data with a stand-in trainer, and wrong commands."""

import contextlib
import getpass
import io
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from dataset_builders.contracts.manifest import load_manifest
from dataset_builders.errors import InputError
from flows.cli.main import main
from flows.cli.run import registration
from flows.pipeline.plan import check_subsets
from flows.pipeline.recipe import load_recipe
from flows.tracking.record import MlflowState
from flows.tracking.store import connect
from tests.flows.pipeline.damages import KINDS, account
from tests.helpers.small_run import athanor, error_line, runs_of, stand_in_trainer
from tests.helpers.tiers import full
from tests.stages.shared.chat_format.test_template import REWRITING, model_with
from trainer.contract.checkpoint import write_checkpoint_record


@pytest.fixture(scope="module")
def finished(small_run, tmp_path_factory) -> Path:
    """Return a root with a finished run, from which the tests of this file go on."""
    return small_run.copy(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def second(finished) -> str:
    """Return the output of the same run when it was repeated, with a checkpoint more in its training than the settings
    keep."""
    (newest,) = finished.glob("artifacts/train/*/checkpoints/step-*")
    older = newest.with_name("step-000003")
    older.mkdir()
    write_checkpoint_record(older, {"step": 3})
    with stand_in_trainer(), contextlib.redirect_stdout(io.StringIO()) as out:
        assert athanor("run", finished) == 0
    return out.getvalue()


def test_an_engine_that_is_not_installed_is_said_before_anything_is_made(tmp_path, capsys):
    assert athanor("run", tmp_path, **{"evaluate.engine": "vllm"}) == 2
    assert "evaluate.engine is 'vllm', which is not installed here" in error_line(capsys)
    assert not list(tmp_path.glob("artifacts/*"))


def test_a_file_in_the_way_of_a_later_stage_is_named_before_any_stage(tmp_path, capsys):
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "tokenize").touch()
    assert athanor("run", tmp_path) == 2
    assert f"{tmp_path}/artifacts/tokenize is not a directory, and one is needed there" in error_line(capsys)
    assert [path.name for path in tmp_path.glob("artifacts/*")] == ["tokenize"]


def test_a_template_that_teaches_what_is_not_asked_is_refused_before_any_stage(tmp_path, capsys):
    hf_dir = model_with(tmp_path, REWRITING)
    assert athanor("run", tmp_path / "root", model=hf_dir, tokenize__system_prompt="null") == 2
    assert f"{hf_dir}: the chat template does not write " in (line := error_line(capsys)) and "with 2 turns" in line
    assert not list((tmp_path / "root").glob("artifacts/*"))


def test_a_run_ends_with_scores_and_the_next_commands(small_run):
    root, text = small_run.root, small_run.printed
    assert "15 of 15 stages made, 0 reused" in text and "overall" in text and "exact_match" in text
    assert re.search(r"train: 5 of 5  loss 0\.2000", text)
    hf_dir = Path(re.search(r"^Model: +(\S+)", text, re.M).group(1))
    assert (hf_dir / "model.safetensors").is_file()
    assert "\nRegistered as athanor-embedded in MLflow: exact_match 0.0000 (0.00 to 0.00)" in text
    assert ": candidate only" in text and re.search(r"^  digits_single .* 0\.0000 \(0\.00 to 0\.00\)", text, re.M)
    for hint in ("report.html", f"athanor up --root {root}\n", " ask ", "--set train.optim.lr="):
        assert hint in text
    assert (root / "example.png").read_bytes().startswith(b"\x89PNG")
    assert str(root) in text.split("--root")[1]


def test_files_of_a_root_are_their_owners_alone(small_run):
    written = list(small_run.root.rglob("*"))
    assert len(written) > 100 and not [path for path in written if path.stat().st_mode & 0o077]


def test_both_models_are_asked_the_same(small_run):
    found = [path.read_bytes() for path in small_run.root.glob("artifacts/answer/*/answers.jsonl")]
    assert len(found) > 1 and len(set(found)) == 1  # the stand-in trainer exports the weights that it was given


def test_a_second_run_makes_nothing_and_stays_in_its_mlflow_run(finished, second):
    assert "0 of 15 stages made, 15 reused" in second and "made in" not in second
    client, (run,) = connect(finished), runs_of(finished, "tags.`athanor.differs` != 'x'")
    assert run.info.status == "FINISHED"
    assert run.info.run_name.startswith("embedded num_scans=40")
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 5
    (data,) = run.inputs.dataset_inputs
    profile = json.loads(data.dataset.profile)
    assert data.dataset.name == "digits" and profile["subsets"] == 4 and profile["train_distinct_images"] > 0
    assert run.data.tags["prefect.flow_run_id"] and "exact_match" in run.data.metrics
    assert {
        "final_loss",
        "final_heldout_loss",
        "timing/train_seconds",
        "timing/flow_seconds",
    } <= run.data.metrics.keys()
    assert any(name.startswith("usage/cpu") for name in run.data.metrics)
    note = run.data.tags["mlflow.note.content"]
    assert (
        "athanor run embedded \\\n    --set data.num_scans=40 \\\n" in note
        and "| overall&emsp; |" in note
        and "report.html" in note
    )
    version = client.get_model_version_by_alias("athanor-embedded", "candidate")
    assert version.run_id == run.info.run_id and "candidate only" in run.data.tags["athanor.champion"]
    assert len(client.search_model_versions("name='athanor-embedded'")) == 1
    assert version.tags["data"] == "digits" and version.tags["base_model"] == "random weights"


def test_a_released_training_has_one_checkpoint_and_everything_is_needed_by_its_version(finished, second, capsys):
    assert [path.name for path in finished.glob("artifacts/train/*/checkpoints/*")] == ["step-000005"]
    there = sorted(finished.glob("artifacts/*/*"))
    assert len(there) == 15 and main(["gc", "--root", str(finished), "--delete"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"athanor-embedded version 1 \(candidate\) +15 ", printed) and "Not understood" not in printed
    assert sorted(finished.glob("artifacts/*/*")) == there


def test_prefect_shows_stages_reports_scores_and_the_mlflow_run(second):
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts()
        flows = {flow.name for flow in client.read_flows()}
    newest = {a.key: str(a.data) for a in sorted(artifacts, key=lambda artifact: artifact.created)}
    assert {"stages", "reports", "scores", "mlflow-run"} <= newest.keys()
    assert "| tokenize | reused |" in newest["stages"] and "exact_match" in newest["scores"]
    assert "/runs/" in newest["mlflow-run"] and "report.html" in newest["reports"]
    assert {"vlm-sft", "prepare-data", "evaluate"} <= flows


@pytest.mark.promise(
    "A setting for a subset that the data does not have is refused once the samples are made, and before they are "
    "tokenized."
)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_setting_for_a_subset_that_is_not_there_is_refused(finished, command, capsys):
    changes = {"tokenize.system_prompt": "Be long.", "evaluate.metrics": "{digits_singel: [exact_match]}"}
    with stand_in_trainer():
        assert athanor(command, finished, **changes) == 2
    assert error_line(capsys).endswith(
        "evaluate.metrics.digits_singel: no sample is of 'digits_singel', only of digits_compare, digits_multi, "
        "digits_single, digits_text; did you mean 'digits_single'?"
    )
    assert len(list(finished.glob("artifacts/tokenize/*"))) == 1


COUNTS = {"a": {"train": 3, "heldout": 1}, "b": {"train": 2}, "c": {"heldout": 4, "train": 0}}


@pytest.mark.promise(
    "A setting for a subset that the data does not have is refused once the samples are made, and before they are "
    "tokenized."
)
@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("evaluate.metrics={a: [cer], b: [cer], c: [cer]}", ""),
        ("evaluate.metrics={d: [cer]}", "evaluate.metrics.d: no sample is of 'd', only of a, b, c"),
        ("plan_bins.mixture={a: {weight: 1}, b: {weight: 1}}", ""),
        ("plan_bins.mixture={c: {weight: 1}}", "plan_bins.mixture.c: no training sample is of 'c', only of a, b"),
        ("execution.registry.gates={score/a: {min: 0}, score: {min: 0}}", ""),
        (
            "execution.registry.gates={score/b: {min: 0}}",
            "execution.registry.gates.score/b: no held-out sample is of 'b', only of a, c",
        ),
        ("execution.registry.metric=score/c", ""),
        (
            "execution.registry.metric=score/overall",
            "execution.registry.metric=score/overall: no held-out sample is of 'overall', only of a, c",
        ),
    ],
)
def test_each_setting_of_a_subset_is_compared_with_the_samples(setting, line):
    config = load_recipe("embedded", [setting]).config
    try:
        check_subsets(config, COUNTS)
    except InputError as error:
        assert str(error) == line
    else:
        assert line == ""


def test_plan_says_which_field_changed(finished, capsys):
    assert athanor("plan", finished) == 0
    assert "0 of 15 stages would be made" in capsys.readouterr().out
    assert athanor("plan", finished, **{"train.optim.lr": 0.004}) == 0
    text = capsys.readouterr().out
    assert "optim.lr: 0.002 -> 0.004" in text and "8 of 15 stages would be made" in text
    assert "its input train will be made first" in text
    assert re.search(r"samples +\d+ train, \d+ held-out", text) and re.search(r"bins +\d+ train", text)
    assert re.search(r"parameters +[\d,]+ \(vision", text) and re.search(r"memory +about", text)


PUSHED = {"execution.registry.push_to": "owner/digits"}


@pytest.fixture
def pushed(monkeypatch) -> list[tuple[Path, str, bool]]:
    """Collect what would be pushed to the hub (directory, name, whether it is private). The hub is not called."""
    calls = []

    def push(hf_dir: Path, repo_id: str, private: bool) -> str:
        calls.append((hf_dir, repo_id, private))
        return f"https://hub.example/{repo_id}"

    monkeypatch.setattr("flows.pipeline.tasks.push_to_hub", push)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    return calls


@pytest.mark.full
def test_a_model_whose_scores_do_not_hold_is_not_registered_and_not_pushed(finished, pushed, capsys):
    client, name = connect(finished), "athanor-embedded"
    before = len(client.search_model_versions(f"name='{name}'"))
    gates = "{exact_match: {min: 0.99}, score: {min_gain: 0.9}, same_answers: {max: 0.5}}"
    changes = {"evaluate.max_new_tokens": 1, "execution.registry.gates": gates}
    assert athanor("run", finished, **changes, **PUSHED) == 0
    text = capsys.readouterr().out
    assert pushed == [] and "7 of 15 stages made, 8 reused" in text and "#/compare-runs?runs=" in text
    (run,) = runs_of(finished, "params.`evaluate.max_new_tokens` = '1'")
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "loss")] == [1, 2, 3, 4, 5]
    assert len(run.inputs.dataset_inputs) == 1
    reason = run.data.tags["athanor.champion"]
    assert reason.startswith("not registered: exact_match 0.") and "is below 0.99; the gain in score, " in reason
    assert reason.endswith("; same_answers 1.0000 is above 0.5") and run.data.metrics["same_answers"] == 1.0
    assert "gain_low" in run.data.metrics and reason in run.data.tags["mlflow.note.content"]
    assert len(client.search_model_versions(f"name='{name}'")) == before


@pytest.mark.full
def test_without_comparison_and_contamination_nothing_of_them_is_made(finished, capsys):
    assert athanor("run", finished, compare="null", contamination="null") == 0
    text = capsys.readouterr().out
    assert "2 of 11 stages made, 9 reused" in text
    card = (Path(re.search(r"^Model: +(\S+)", text, re.M).group(1)) / "README.md").read_text()
    assert "Not looked for." in card


def test_the_recipe_on_the_card_makes_the_same_model(small_run, finished, capsys, tmp_path):
    card = (Path(re.search(r"^Model: +(\S+)", small_run.printed, re.M).group(1)) / "README.md").read_text()
    (tmp_path / "recipe.yaml").write_text(re.findall(r"```yaml\n(.*?)```", card, re.S)[0])
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--root", str(finished)]) == 0
    assert "0 of 15 stages would be made" in capsys.readouterr().out


@pytest.mark.full
def test_a_model_goes_to_the_hub_with_its_card(finished, pushed):
    assert athanor("run", finished, **PUSHED) == 0
    ((hf_dir, repo_id, private),) = pushed
    assert (hf_dir.parent.parent.name, repo_id, private) == ("release", "owner/digits", True)
    assert "# athanor-embedded" in (hf_dir / "README.md").read_text()


def test_a_push_without_a_token_is_said_before_anything_is_made(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert athanor("run", tmp_path, **{"execution.registry.push_to": "owner/digits"}) == 2
    assert "pushing to owner/digits needs a token" in error_line(capsys)
    assert not list(tmp_path.glob("artifacts/*"))


def test_a_full_disk_is_one_line_with_the_way_out(finished, capsys, monkeypatch):
    def full_disk(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    changes = {"compare": "null", "evaluate.max_new_tokens": 4}
    with monkeypatch.context() as patch:
        patch.setattr("stages.answer.parts._write_part", full_disk)
        assert athanor("run", finished, **changes) == 2
    line = error_line(capsys)
    assert "disk full while answer wrote" in line and "run the same command again" in line


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("fail", 1, "loss is nan at step 4 Samples of that step: a/00000001. Log: "),
        full("input", 2, "hf_dir has no weights"),
        full("stop", 75, "run the same command again to go on"),
    ],
)
def test_how_a_failed_training_is_told(finished, capsys, monkeypatch, how, status, words):
    monkeypatch.setenv("FAKE_TRAINER", how)
    assert athanor("run", finished, **{"train.seed": 9}) == status
    assert words in error_line(capsys)
    (run,) = runs_of(finished, "params.`train.seed` = '9'")
    assert run.info.status == "FAILED"


def test_sigterm_gives_the_trainer_time_to_save(finished, capsys, monkeypatch):
    def terminate_once_it_trains():
        for _ in range(600):
            if any((finished / "scratch").glob("train-*/metrics.jsonl")):
                return os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)

    monkeypatch.setenv("FAKE_TRAINER", "wait")
    for left in (finished / "scratch").glob("train-*/metrics.jsonl"):
        left.unlink()
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=terminate_once_it_trains)
    thread.start()
    try:
        assert athanor("run", finished, **{"train.seed": 11}) == 128 + signal.SIGTERM
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert "stopped, step 3 saved; the same command resumes" in error_line(capsys)
    assert list((finished / "scratch").glob("train-*/saved"))
    (run,) = runs_of(finished, "params.`train.seed` = '11'")
    assert run.info.status == "KILLED"


def test_what_is_said_of_the_registration():
    assert registration("m", [], True, MlflowState()) == ["Registered as m in MLflow."]
    answers = MlflowState(verdict="no champion before: champion")
    expected = "Registered as m in MLflow: no champion before: champion."
    assert registration("m", [], True, answers) == [expected]
    assert registration("m", ["a", "b"], True, MlflowState()) == ["Not registered as m: a", "Not registered as m: b"]
    (line,) = registration("m", [], False, MlflowState())
    assert line.startswith("Not registered as m: the run's record could not be written")
    assert registration("m", [], True, answers, is_sent=False)[0].startswith("Not registered as m yet: MLflow")


def test_debug_shows_the_traceback(tmp_path, capsys):
    assert main(["plan", "--debug", "--set", "train.lr=1", "--root", str(tmp_path)]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_ask_refuses_what_is_no_model(tmp_path, capsys):
    assert main(["ask", str(tmp_path), "-", "Which digit?"]) == 2
    assert "has no config.json" in error_line(capsys)


def test_what_was_made_from_another_training_is_planned_again(small_run, tmp_path, capsys):
    """The finished training has other bytes with the same fingerprint, as one of another GPU would."""
    root = small_run.copy(tmp_path)
    (trained,) = root.glob("artifacts/train/*")
    manifest = load_manifest(trained)
    manifest.model_copy(update={"stats": manifest.stats | {"loss": 9.0}}).write(trained)
    assert athanor("plan", root) == 0
    printed = capsys.readouterr().out
    assert re.search(r"export +make +its input train was made again with other content", printed)
    assert re.search(r"answer +make +its input export will be made first", printed)


@pytest.mark.promise(
    "A damaged record, shard, index, plan, manifest or exported weight is not used, and one line names it."
)
def test_sixty_damages_of_a_finished_root_are_accounted_for(finished, tmp_path, caplog):
    """Damage data, models before and after training, checkpoints, answers and scores. Each damaged file is named."""
    told = [account(number, finished, tmp_path, caplog) for number in range(60)]
    assert all(line for _, _, line in told)
    stages, kinds = {stage for stage, _, _ in told}, {kind for _, kind, _ in told}
    assert kinds == set(KINDS) and len(stages) > 10


def test_mlflow_says_who_gave_the_command(finished):
    assert {run.data.tags["mlflow.user"] for run in runs_of(finished)} == {getpass.getuser()}


@pytest.mark.full
@pytest.mark.promise(
    "`athanor gc` keeps what a registered version, a run, a named recipe or unfinished work needs and what it does not "
    "understand, and frees what it says."
)
def test_gc_frees_and_a_run_after_it_still_registers_and_so_does_one_in_a_backup(small_run, tmp_path):
    root = small_run.copy(tmp_path)
    with stand_in_trainer():
        first = set(root.glob("artifacts/*/*"))
        assert athanor("run", root, **{"train.seed": 1}) == 0
        connect(root).delete_model_version("athanor-embedded", "2")
        extra = set(root.glob("artifacts/*/*")) - first
        shutil.rmtree(root / "service" / "runs")  # as at the end of the process of a run
        assert extra and main(["gc", "--root", str(root), "--delete"]) == 0
        assert set(root.glob("artifacts/*/*")) == first | extra  # a run of this week
        assert main(["gc", "--root", str(root), "--days", "0", "--delete"]) == 0
        assert set(root.glob("artifacts/*/*")) == first
        assert athanor("run", root, **{"train.seed": 2}) == 0
        assert len(connect(root).search_model_versions()) == 2
        backup = tmp_path / "backup"
        assert main(["backup", str(backup), "--root", str(root)]) == 0
        assert athanor("run", backup, **{"train.seed": 3}) == 0
        assert len(connect(backup).search_model_versions()) == 3
