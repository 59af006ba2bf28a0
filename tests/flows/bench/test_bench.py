"""`athanor bench` with a stand-in for lmms-eval: questions, scores in the run and its gates, refusals, reuse."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

import flows.tracking.tracker
from dataset_builders.contracts.fingerprint import fingerprint
from dataset_builders.contracts.manifest import Manifest
from flows.bench.bench import gate_refusals, own_scores
from flows.cli.main import main
from flows.pipeline.graph import pipeline_nodes
from flows.pipeline.recipe import load_recipe
from flows.tracking.config import Gate, RegistryConfig
from flows.tracking.record import load_record
from flows.tracking.store import connect
from flows.tracking.tracker import Opening, Tracker, open_run
from stages.artifacts.artifact import Artifact, artifact_dir, stage_identity
from stages.artifacts.run_stage import run_stage
from stages.evaluate.predictions import read_predictions
from tests.flows.bench import lmms_eval_stand_in
from tests.helpers.small_run import SMALL
from tests.helpers.tracked_run import Nobody

pytestmark = pytest.mark.promise(
    "`athanor bench` gives lmms-eval, here a stand-in, our evaluation's questions; its scores reach the run's gates."
)

SETTINGS = [f"{name}={value}" for name, value in SMALL.items()] + [
    "evaluate.metrics={digits_text: [relaxed_accuracy], digits_single: [cer, exact_match], digits_multi: [vqa_em]}"
]
# Only the manifests of these stages are read, and their models, which are the untrained one.
UNREAD = ("tokenize", "plan_bins", "train", "export", "answer_base", "evaluate_base", "compare", "release", "reload")
KEY = "a" * 16
GATES = {"bench/heldout/exact_match": {"min": 0.9, "min_gain": 0.5}}

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict[str, Artifact]]:
    """Make a root with the artifacts of a run, and return both."""
    root, config, there = tmp_path_factory.mktemp("my root"), load_recipe("embedded", SETTINGS).config, {}
    for node in pipeline_nodes(config):
        inputs, stage = node.read(there), node.load()
        if node.name not in UNREAD:
            there[node.name] = run_stage(stage, node.config, inputs, root).artifact
            continue
        identity = stage_identity(stage, node.config, inputs)
        directory = artifact_dir(root, stage, identity)
        directory.mkdir(parents=True)
        if node.name in ("export", "release"):
            shutil.copytree(there["embedded_model"].dir / "hf", directory / "hf")
        stats = {"compare": {"gains": {}, "subsets": {}}, "reload": {"reason": "peft answers differently"}}.get(
            node.name, {}
        )
        Manifest(**identity, fingerprint=fingerprint(identity), stats=stats).write(directory)
        there[node.name] = Artifact.load(directory)
    return root, there


@pytest.fixture
def root(whole, tmp_path, monkeypatch) -> Path:
    """Return a copy of the root for one test, with the record of its run, of which MLflow holds nothing yet."""
    root = shutil.copytree(whole[0], tmp_path / "my root")
    opening = Opening(
        experiment="athanor-bench",
        name="embedded",
        identity=KEY,
        params={},
        tags={},
        recipe_yaml=yaml.safe_dump(load_recipe("embedded", SETTINGS).config.model_dump(mode="json")),
        registry=RegistryConfig(gates=GATES, min_answers=1),
        samples_host=False,
    )
    there = {name: Artifact.load(root / one.dir.relative_to(whole[0])) for name, one in whole[1].items()}
    with monkeypatch.context() as patch:
        patch.setattr(flows.tracking.tracker, "sender_of", lambda root: Nobody())
        tracker = Tracker(root, open_run(root, opening))
        for name, artifact in there.items():
            tracker.log_stage(artifact, False, name)
        hf_dir = there["release"].dir / "hf"
        tracker.register(there["export"], there["evaluate"], hf_dir, "athanor-bench", ["not measured"])
        tracker.finish("FINISHED")
    return root


@pytest.fixture
def no_mlflow(monkeypatch):
    """Let nothing be sent to MLflow."""
    monkeypatch.setattr(flows.tracking.tracker, "sender_of", lambda root: Nobody())


@pytest.fixture
def python(tmp_path) -> Path:
    """Return a "Python" that runs the stand-in in place of lmms-eval."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{lmms_eval_stand_in.__file__}" "$@"\n')
    script.chmod(0o755)
    return script


def stage_dir(root: Path, stage: str) -> Path:
    return root / load_record(root, KEY).stages[stage].dir


def bench(root: Path, python: Path, *arguments: str, model: Path | None = None) -> int:
    model = model or stage_dir(root, "release") / "hf"
    return main(["bench", str(model), "--root", str(root), "--python", str(python), *arguments])


def folder_of(root: Path) -> Path:
    return root / "bench" / stage_dir(root, "evaluate").name


def test_scores_come_into_the_run_and_open_its_gate(root, python, capsys):
    assert bench(root, python, "--tasks", "heldout,mme") == 0
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert ["heldout", "exact_match", "6", "0.0000", "1.0000", "(1.00", "to", "1.00)"] in [line[:8] for line in lines]
    # The interval is from lmms-eval's standard errors, that of the gain as for two samples.
    mme = ["mme", "mme_score", "1000.0000", "1200.0000", "(1141.20", "to", "1258.80)", "+200.0000"]
    assert [*mme, "(+116.85", "to", "+283.15)"] in lines
    assert "Registered as athanor-bench in MLflow" in text
    client = connect(root)
    (run,) = client.search_runs([client.get_experiment_by_name("athanor-bench").experiment_id])
    metrics = run.data.metrics
    assert metrics["bench/heldout/exact_match"] == metrics["bench/heldout/exact_match/gain_low"] == 1
    assert metrics["bench/heldout/exact_match/before"] == 0 and metrics["bench/mme/mme_score/gain"] == 200
    assert [item.path for item in client.list_artifacts(run.info.run_id, "bench")] == ["bench/benchmarks.md"]
    (version,) = client.search_model_versions("name='athanor-bench'")
    assert version.run_id == run.info.run_id
    document = json.loads((folder_of(root) / "benchmarks.json").read_text())
    assert (
        document["scores"]["bench/mme/acc"]["questions"] == 2 and "--tasks heldout,mme" in document["commands"]["after"]
    )


@pytest.mark.usefixtures("no_mlflow")
def test_a_gate_that_fails_keeps_the_model_out(root, python, capsys):
    assert bench(root, python, "--before", str(stage_dir(root, "release") / "hf"), "--tasks", "mme") == 0
    line = "bench/heldout/exact_match is not measured yet; `athanor bench MODEL --tasks heldout` measures it and then"
    assert f"Not registered as athanor-bench: {line} registers the model\n" in capsys.readouterr().out
    record = load_record(root, KEY)
    weak = {"bench/heldout/exact_match": record.benchmarks["bench/mme/acc"].model_copy(update={"value": 0.5})}
    assert gate_refusals(root, record, weak) == ["bench/heldout/exact_match 0.5000 is below 0.9"]
    assert record.registration.refusals and record.registration.refusals != ["not measured"]
    record.opening.registry.gates["same_answers"] = Gate(min=1.0)
    record.registration.scores["overall"]["same_answers"] = 0.5
    assert gate_refusals(root, record, weak)[1] == "same_answers 0.5000 is below 1: peft answers differently"


@pytest.mark.usefixtures("no_mlflow")
def test_the_questions_of_our_own_evaluation_are_asked(root, python, capsys):
    assert bench(root, python) == 0
    answers = read_predictions(stage_dir(root, "evaluate")).to_pylist()
    rows = pq.read_table(folder_of(root) / "task" / "heldout.parquet", columns=["key", "turn", "subset", "metric"])
    asked = rows.to_pylist()
    assert [(q["key"], q["turn"]) for q in asked] == [(a["key"], a["turn"]) for a in answers]
    metrics = dict.fromkeys(("digits_compare", "digits_multi", "digits_single"), "exact_match")
    metrics |= {"digits_text": "relaxed_accuracy"}  # the headlines that lmms-eval has
    assert {q["subset"]: q["metric"] for q in asked} == metrics
    call = (folder_of(root) / "after" / "calls.txt").read_text()
    assert "--model qwen3_vl" in call and f"--include_path {folder_of(root) / 'task'}" in call
    assert "device=cpu,device_map=cpu" in call and " questions show an image of fewer than" in capsys.readouterr().out


@pytest.mark.usefixtures("no_mlflow")
def test_finished_answers_are_reused_and_a_part_is_not_recorded(root, python, capsys):
    for arguments in (["--limit", "2"], [], []):
        assert bench(root, python, *arguments) == 0
    calls = (folder_of(root) / "before" / "calls.txt").read_text().splitlines()
    assert ["--limit 2" in call for call in calls] == [True, False]
    text = capsys.readouterr().out
    assert text.count("Not recorded in MLflow or in gates: --limit asks only a part of the questions.") == 1


def test_an_error_of_lmms_eval_is_its_line(root, python, capsys):
    assert bench(root, python, "--tasks", "nosuch_task") == 1
    (line,) = capsys.readouterr().err.splitlines()
    log = folder_of(root) / "before" / "lmms-eval.log"
    assert line.startswith("athanor: ValueError: Tasks not found: nosuch_task. See the list (exit status 1; log: ")
    assert str(log) in line and log.is_file()


def test_a_model_of_no_run_is_asked_other_tasks(root, python, tmp_path, capsys):
    other = shutil.copytree(stage_dir(root, "export") / "hf", tmp_path / "other")
    assert bench(root, python, model=other) == 2
    assert f"--tasks heldout: no run in {root} made the model {other}; give the" in capsys.readouterr().err
    assert bench(root, python, "--tasks", "mme", model=other) == 0
    text = capsys.readouterr().out
    assert "Not recorded in MLflow or in gates: no run of this root made the model." in text
    assert "  mme   acc                2          1.0000 (1.00 to 1.00)" in text and "before" not in text.split("\n")[0]


def test_what_cannot_run_is_one_line(root, tmp_path, capsys):
    cases = {
        tmp_path / "nowhere": "No such file or directory; give the path of a Python that has lmms-eval",
        Path("/bin/true"): "cannot import lmms-eval (no message); install it: ",
        Path(sys.executable): "cannot import lmms-eval (ModuleNotFoundError: No module named 'decord'); install it: ",
    }
    for python, words in cases.items():
        assert bench(root, python) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"athanor: --python {python}") and words in line
    assert main(["bench", str(tmp_path / "nowhere"), "--root", str(root)]) == 2
    assert "model '" in capsys.readouterr().err


def test_our_own_answers_are_scored_as_lmms_eval_scores_them():
    """Check single subsets and all answers of a metric together, with the functions that lmms-eval calls."""
    given = {"a": [("yes", "Yes."), ("No. ", "no."), ("three", "3")], "b": [("b", "B")], "c": [("kitten", "sitting")]}
    rows = [
        {"subset": subset, "question": "?", "answer": answer, "references": [right]}
        for subset, answers in given.items()
        for answer, right in answers
    ]
    scores = own_scores(rows, {"a": "exact_match", "b": "exact_match", "c": "anls"})
    assert scores == {
        "bench/heldout/exact_match": 0.5,
        "bench/heldout/exact_match_a": pytest.approx(1 / 3),
        "bench/heldout/exact_match_b": 1.0,
        "bench/heldout/anls": pytest.approx(4 / 7),
        "bench/heldout/anls_c": pytest.approx(4 / 7),
    }
