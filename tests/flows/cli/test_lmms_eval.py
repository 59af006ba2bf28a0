"""`athanor lmms-eval` as a user types it: the questions of athanor's evaluation, its scores, and missing artifacts."""

import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from dataset_builders.contracts.fingerprint import fingerprint
from dataset_builders.contracts.manifest import Manifest
from dataset_builders.storage.store import location, side_dir
from flows.cli.commands.lmms_eval import score_rows
from flows.cli.main import main, make_parser
from flows.pipeline.graph import pipeline_nodes, plan_stages
from flows.pipeline.recipe import load_recipe
from stages.artifacts.artifact import Artifact, artifact_dir, stage_identity
from stages.artifacts.run_stage import run_stage
from stages.evaluate.lmms_eval.functions import process_results
from stages.evaluate.predictions import read_predictions
from stages.evaluate.stage import STAGE as EVALUATE
from tests.flows.pipeline.test_run import SMALL
from tests.helpers.object_store import BUCKET, moto_server

SETTINGS = [f"{name}={value}" for name, value in SMALL.items()] + [
    "evaluate.metrics={digits_text: [relaxed_accuracy], digits_single: [cer, exact_match], digits_multi: [vqa_em]}"
]


UNREAD = (
    "tokenize",
    "plan_bins",
    "train",
    "export",
)  # the command reads only the manifests of these stages, and the model


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Make a root with the artifacts of a run up to its evaluation. The model is the untrained one."""
    root, config, found = tmp_path_factory.mktemp("my root"), load_recipe("embedded", SETTINGS).config, {}
    for node in pipeline_nodes(config):
        inputs, stage = node.read(found), node.load()
        if node.name in UNREAD:
            identity = stage_identity(stage, node.config, inputs)
            directory = artifact_dir(root, stage, identity)
            directory.mkdir(parents=True)
            if node.name == "export":
                shutil.copytree(found["embedded_model"].dir / "hf", directory / "hf")
            Manifest(**identity, fingerprint=fingerprint(identity)).write(directory)
            found[node.name] = Artifact.load(directory)
            continue
        found[node.name] = run_stage(stage, node.config, inputs, root).artifact
        if node.name == "evaluate":
            return root
    raise AssertionError


def lmms_eval(root: object, *arguments: object, settings: list[str] = SETTINGS) -> int:
    sets = [word for setting in settings for word in ("--set", setting)]
    return main(["lmms-eval", "embedded", "--root", str(root), *sets, *map(str, arguments)])


def artifact(root: Path, stage: str) -> Artifact:
    planned, _ = plan_stages(load_recipe("embedded", SETTINGS).config, root)
    return next(found.artifact for found in planned if found.name == stage)


def _evaluate_inputs(settings: list[str]) -> Iterable[tuple[str, str]]:
    nodes = pipeline_nodes(load_recipe("embedded", settings).config)
    return next(node.inputs.items() for node in nodes if node.name == "evaluate")


def questions(task: Path) -> list[dict]:
    columns = ["key", "turn", "subset", "metric"]
    return pq.read_table(task / "heldout.parquet", columns=columns).to_pylist()


def words_of(text: str) -> list[str]:
    """Return the words of the printed command as a shell splits them."""
    return shlex.split(text[text.index("HF_HUB_OFFLINE") :].replace("\\\n", " "))


def table(text: str) -> list[list[str]]:
    lines = text.split("Our own evaluation\n")[1].split("\n\n")[0].splitlines()
    return [line.split() for line in lines[1:]]


def test_the_questions_of_our_own_evaluation_are_asked(root, tmp_path, capsys):
    assert lmms_eval(root, "--out", tmp_path / "a task") == 0
    text = capsys.readouterr().out
    answers = read_predictions(artifact(root, "evaluate").dir).to_pylist()
    asked = questions(tmp_path / "a task")
    assert [(q["key"], q["turn"]) for q in asked] == [(a["key"], a["turn"]) for a in answers]
    heldout = sum(s.num_samples for s in artifact(root, "convert").manifest.shards if s.split == "heldout")
    assert 0 < len({q["key"] for q in asked}) < heldout  # evaluate.max_samples_per_subset
    assert f"Task:  {tmp_path / 'a task'}  ({len(answers)} questions)\n" in text
    assert f"{sum('text' not in a['key'] for a in answers)} of {len(answers)} questions show a picture of fewer" in text


def test_each_subset_has_its_headline_or_exact_match(root, tmp_path, capsys):
    assert lmms_eval(root, "--out", tmp_path / "task") == 0
    text = capsys.readouterr().out
    there = {
        "digits_compare": "exact_match",
        "digits_multi": "exact_match",
        "digits_single": "exact_match",
        "digits_text": "relaxed_accuracy",
    }
    assert {q["subset"]: q["metric"] for q in questions(tmp_path / "task")} == there
    assert "by exact_match, as it lacks our metric: digits_multi (vqa_em), digits_single (cer).\n" in text
    scores, rows = artifact(root, "evaluate").manifest.stats["scores"], table(text)
    ours = {"digits_compare": "exact_match", "digits_multi": "vqa_em", "digits_single": "cer"}
    for (subset, metric), row in zip((ours | {"digits_text": "relaxed_accuracy"}).items(), rows):
        assert [row[0], *row[2:5]] == [subset, metric, f"{scores[subset][metric]:.4f}", f"{there[subset]}_{subset}"]
    assert rows[4] == ["overall", str(len(questions(tmp_path / "task"))), "score", f"{scores['overall']['score']:.4f}"]
    assert [row[1] for row in rows[5:]] == ["exact_match", "relaxed_accuracy"]
    assert lmms_eval(root, "--out", tmp_path / "task") == 0, "a task is written again in its place"


def test_the_command_names_the_export_and_the_task(root, capsys):
    assert lmms_eval(root) == 0
    text, evaluation = capsys.readouterr().out, artifact(root, "evaluate").dir
    words, directory = words_of(text), root / "lmms-eval" / evaluation.name
    given = dict(zip(words[5::2], words[6::2]))
    assert given["--model_args"] == f"pretrained={artifact(root, 'export').dir / 'hf'}"
    assert given["--include_path"] == str(directory) and (directory / f"{given['--tasks']}.yaml").is_file()
    text = (directory / "athanor_heldout.yaml").read_text().partition("doc_to_messages")[0]
    assert yaml.safe_load(text)["generation_kwargs"]["max_new_tokens"] == SMALL["evaluate.max_new_tokens"]


def test_what_is_to_be_compared_is_what_lmms_eval_finds_for_the_same_answers():
    """Check single subsets and all answers of a metric together, with the functions that lmms-eval calls."""
    said = {"a": [("yes", "Yes."), ("No. ", "no."), ("three", "3")], "b": [("b", "B")], "c": [("kitten", "sitting")]}
    headline = {"a": "vqa_em", "b": "exact_match", "c": "anls"}
    rows = [
        {"subset": subset, "metric": headline[subset], "question": "?", "answer": answer, "references": [right]}
        for subset, answers in said.items()
        for answer, right in answers
    ]
    metrics = {"a": "exact_match", "b": "exact_match", "c": "anls"}
    scores = {"a": {"vqa_em": 1.0}, "b": {"exact_match": 1.0}, "c": {"anls": 4 / 7}, "overall": {"score": 6 / 7}}
    assert score_rows(rows, metrics, scores) == [
        ("a", "3", "vqa_em", "1.0000", "exact_match_a", "0.3333"),
        ("b", "1", "exact_match", "1.0000", "exact_match_b", "1.0000"),
        ("c", "1", "anls", "0.5714", "anls_c", "0.5714"),
        ("overall", "5", "score", "0.8571", "", ""),
        ("", "1", "", "", "anls", "0.5714"),
        ("", "4", "", "", "exact_match", "0.5000"),
    ]
    there = [process_results({**row, "metric": "exact_match"}, [row["answer"]]) for row in rows[:4]]
    assert sum(found["exact_match"] for found in there) / 4 == 0.5
    assert sum(found.get("exact_match_a", 0) for found in there) / 3 == pytest.approx(1 / 3)


def test_where_all_metrics_are_there_it_says_so(root, capsys):
    plain = SETTINGS[:-1]
    assert lmms_eval(root, settings=plain) == 2, "another evaluation, which was not made"
    line = capsys.readouterr().err
    assert line.startswith("athanor: evaluate of recipe embedded is not made yet (metrics: ")
    assert line.endswith(f"; make it by: athanor run embedded {shlex.join(_sets(plain))} --root '{root}'\n")
    config = load_recipe("embedded", plain).config.evaluate
    inputs = {role: artifact(root, stage) for role, stage in _evaluate_inputs(plain)}
    made = run_stage(EVALUATE, config, inputs, root).artifact
    assert lmms_eval(root, settings=plain) == 0
    assert "lmms-eval scores every subset by the same metric.\n" in capsys.readouterr().out
    shutil.rmtree(made.dir)  # other tests use the same root


def _sets(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_the_first_stage_that_is_missing_is_named(root, tmp_path, capsys):
    assert lmms_eval(root, "--set", "train.seed=5") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("athanor: train of recipe embedded is not made yet (seed: 0 -> 5); make it by: athanor run ")
    assert lmms_eval(tmp_path / "empty") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "embedded_data of recipe embedded is not made yet (never made in this root)" in line
    assert not (tmp_path / "empty").exists()


def test_a_place_that_cannot_hold_a_task_is_one_line(root, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "README.md").write_text("mine")
    cases = {
        tmp_path / "file": "is a file; give a directory",
        tmp_path / "full": "holds other files than a task; give a new directory",
        "memory://bucket/task": "lmms-eval reads a task from this machine's disk; give a local directory",
    }
    for out, wanted in cases.items():
        assert lmms_eval(root, "--out", out) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"athanor: --out {out}{':' if '://' in str(out) else ''} {wanted}"
    assert (tmp_path / "full" / "README.md").read_text() == "mine" and len(list(tmp_path.rglob("*"))) == 3


def test_a_root_in_a_store_gives_the_same_task(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ATHANOR_CACHE_DIR", str(tmp_path / "cache"))
    assert lmms_eval(root, "--out", tmp_path / "local") == 0
    with moto_server():
        store = location(f"s3://{BUCKET}/root")
        for file in (root / "artifacts").rglob("*"):
            if file.is_file():
                store.fs.put_file(str(file), (store / str(file.relative_to(root))).path)
        capsys.readouterr()
        assert lmms_eval(store) == 0
        words = words_of(capsys.readouterr().out)
        directory = side_dir(store) / "lmms-eval" / artifact(root, "evaluate").dir.name
    given = dict(zip(words[5::2], words[6::2]))
    assert given["--include_path"] == str(directory)
    assert (directory / "heldout.parquet").read_bytes() == (tmp_path / "local" / "heldout.parquet").read_bytes()
    assert (Path(given["--model_args"].removeprefix("pretrained=")) / "model.safetensors").is_file()


def test_help_names_it():
    assert "lmms-eval" in make_parser().format_help()
