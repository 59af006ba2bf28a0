"""The evaluate stage: what is asked and counted, what its artifact holds, and that being killed changes nothing."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

import stages.evaluate as evaluate
from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.sample import Message, Sample
from stages.artifact import run_stage
from stages.evaluate import STAGE, EvaluateConfig, EvaluateResources
from stages.generate import Answer, Generator
from stages.metrics import METRICS
from stages.predictions import PREDICTIONS_SCHEMA, read_predictions
from tests.helpers.evaluation import (
    conversation,
    hf_artifact,
    mixed_samples,
    picture,
    samples_artifact,
    talkative_hf_dir,
)

CONFIG = EvaluateConfig(max_new_tokens=6)


def _tree(directory):
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def _inputs(tmp_path, heldout):
    export = hf_artifact(tmp_path / "export", talkative_hf_dir())
    return {"hf": export, "samples": samples_artifact(tmp_path / "samples", heldout)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An evaluation of mixed samples by a real model, in four windows, and its inputs."""
    root = tmp_path_factory.mktemp("evaluate")
    train = [conversation("single/00000999", [("<image>Which digit?", "9")], [picture(999)])]
    samples = samples_artifact(root / "samples", mixed_samples(14), train)
    inputs = {"hf": hf_artifact(root / "export", talkative_hf_dir()), "samples": samples}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "WINDOW", 4)
        result = run_stage(STAGE, CONFIG, inputs, root / "root")
    return inputs, result.artifact


def test_every_assistant_turn_of_the_heldout_samples_is_answered(made):
    rows = read_predictions(made[1].dir).to_pylist()
    wanted = [
        (sample.key, turn, message.text)
        for sample in mixed_samples(14)
        for turn, message in enumerate(m for m in sample.messages if m.role == "assistant")
    ]
    assert [(r["key"], r["turn"], r["reference"]) for r in rows] == wanted
    assert [r["question"] for r in rows if r["key"] == "multi/00000003"] == [
        "Which digit is in the picture?",
        "How many strokes?",
        "Again?",
    ]


def test_answers_are_those_of_each_prompt_alone(made):
    generator = Generator(talkative_hf_dir())
    rows = {(r["key"], r["turn"]): r for r in read_predictions(made[1].dir).to_pylist()}
    for sample in mixed_samples(14):
        images = generator.encode_images(sample.images)
        for place in range(1, len(sample.messages), 2):
            prompt = generator.encode_prompt(sample.messages[:place], images)
            (answer,) = generator.generate([prompt], CONFIG.max_new_tokens)
            row = rows[sample.key, place // 2]
            assert (row["answer"], row["stopped"]) == (answer.text, answer.stopped), (sample.key, place)


def test_predictions_hold_the_first_picture_untouched(made):
    table = read_predictions(made[1].dir)
    assert table.schema == PREDICTIONS_SCHEMA
    images = {sample.key: sample.images[0] if sample.images else None for sample in mixed_samples(14)}
    assert all(row["image"] == images[row["key"]] for row in table.to_pylist())


def test_counts_and_scores_are_in_the_manifest(made):
    stats = made[1].manifest.stats
    assert stats["counts"]["overall"] == {"samples": 14, "answers": 20, "pictures": 13}
    assert stats["counts"]["text"] == {"samples": 4, "answers": 4, "pictures": 0}
    assert stats["counts"]["pair"] == {"samples": 3, "answers": 3, "pictures": 6}
    assert list(stats["scores"]) == ["multi", "overall", "pair", "single", "text"]
    assert all(set(scores) == set(METRICS) for scores in stats["scores"].values())
    report = json.loads((made[1].dir / "report.json").read_text())
    assert report["summary"]["answers"] == 20
    assert (made[1].dir / "report.html").is_file()


class ScriptedGenerator:
    """Answers by the number of the call, so that scores can be known; encodes nothing."""

    script: tuple[Answer, ...] = ()

    def __init__(self, hf_dir):
        self.encoder = Generator(talkative_hf_dir())

    def encode_images(self, images):
        return self.encoder.encode_images(images)

    def encode_prompt(self, messages, images):
        return self.encoder.encode_prompt(messages, images)

    def generate(self, prompts, max_new_tokens):
        assert len(prompts) == len(self.script)
        return list(self.script)


def _scripted(monkeypatch, tmp_path, samples, script):
    # Prompts are handed over the longest first; these are all equally long, so the order is the samples'.
    monkeypatch.setattr(ScriptedGenerator, "script", script)
    monkeypatch.setattr(evaluate, "Generator", ScriptedGenerator)
    inputs = {
        "hf": hf_artifact(tmp_path / "e", talkative_hf_dir()),
        "samples": samples_artifact(tmp_path / "s", samples),
    }
    return run_stage(STAGE, CONFIG, inputs, tmp_path / "root").artifact


def test_scores_count_right_stopped_and_empty_answers(monkeypatch, tmp_path):
    samples = [conversation(f"digits/{i:08d}", [("Which digit?", " 7")]) for i in range(3)]
    samples.append(conversation("other/00000003", [("Which digit?", "Left")]))
    script = (Answer("7", True, 1), Answer("7 7", False, 6), Answer("", True, 0), Answer("left\n", True, 2))
    artifact = _scripted(monkeypatch, tmp_path, samples, script)
    third = pytest.approx(1 / 3)
    assert artifact.manifest.stats["scores"] == {
        "digits": {
            "exact_match": third,
            "stop_rate": pytest.approx(2 / 3),
            "empty_rate": third,
            "mean_answer_tokens": pytest.approx(7 / 3),
        },
        "other": {"exact_match": 1.0, "stop_rate": 1.0, "empty_rate": 0.0, "mean_answer_tokens": 2.0},
        "overall": {"exact_match": 0.5, "stop_rate": 0.75, "empty_rate": 0.25, "mean_answer_tokens": 2.25},
    }
    assert [r["correct"] for r in read_predictions(artifact.dir).to_pylist()] == [True, False, False, True]


def test_answers_with_any_characters_are_kept(monkeypatch, tmp_path):
    said = "a\u2028b\x85c\nd\te \ufffd \U0001f600"
    samples = [conversation("digits/00000000", [("Which digit?", "7")])]
    artifact = _scripted(monkeypatch, tmp_path, samples, (Answer(said, True, 9),))
    assert [row["answer"] for row in read_predictions(artifact.dir).to_pylist()] == [said]


def test_the_report_shows_wrong_answers_first(monkeypatch, tmp_path):
    samples = [conversation(f"digits/{i:08d}", [("<image>Which?", "7")], [picture(i)]) for i in range(3)]
    artifact = _scripted(
        monkeypatch, tmp_path, samples, (Answer("7", True, 1), Answer("1", True, 1), Answer("7", True, 1))
    )
    sections = json.loads((artifact.dir / "report.json").read_text())["sections"]
    pictures = [section["captions"] for section in sections if section["kind"] == "pictures"]
    assert [len(captions) for captions in pictures] == [1, 2]
    assert pictures[0][0] == "Which?\nanswer: 1\nreference: 7\ndigits/00000001"


def test_a_sample_that_cannot_be_asked_is_left_out_and_counted(tmp_path):
    broken = Sample(
        key="digits/00000001",
        messages=(Message(role="user", text="<image>Which?"), Message(role="assistant", text="7")),
        images=(b"no image",),
    )
    samples = [conversation("digits/00000000", [("Which digit?", "7")]), broken]
    inputs = {
        "hf": hf_artifact(tmp_path / "e", talkative_hf_dir()),
        "samples": samples_artifact(tmp_path / "s", samples),
    }
    manifest = run_stage(STAGE, CONFIG, inputs, tmp_path / "root").artifact.manifest
    assert manifest.skips == {"decode_error": 1}
    assert manifest.stats["counts"]["overall"]["samples"] == 1


def test_max_samples_per_subset_takes_the_first_of_each(made, tmp_path):
    config = EvaluateConfig(max_new_tokens=1, max_samples_per_subset=2)
    seen = []
    resources = EvaluateResources(batch_size=3, on_progress=lambda *now: seen.append(now))
    artifact = run_stage(STAGE, config, made[0], tmp_path, resources).artifact
    assert sorted({r["key"] for r in read_predictions(artifact.dir).to_pylist()}) == sorted(
        sample.key for sample in mixed_samples(8)
    )
    assert seen[-1] == (8, 8)


def test_batches_hold_like_lengths_and_keep_both_limits():
    lengths = [5, 900, 7, 300, 6, 299, 5]
    batches = list(evaluate._batches(lengths, EvaluateResources(batch_size=3, batch_tokens=1000)))
    assert batches == [[1], [3, 5, 2], [4, 0, 6]]
    assert list(evaluate._batches([2000], EvaluateResources(batch_tokens=1000))) == [[0]]
    assert list(evaluate._batches([], EvaluateResources())) == []


KILLED_RUN = """
    import os, signal
    from pathlib import Path
    import stages.evaluate as evaluate
    from stages.artifact import Artifact, run_stage

    samples, export, root = (Path(p) for p in {paths!r})
    evaluate.WINDOW = 4
    real = evaluate._answer_window
    windows = []

    def answer(*arguments):
        windows.append(real(*arguments))
        if len(windows) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return windows[-1]

    evaluate._answer_window = answer
    config = evaluate.EvaluateConfig(max_new_tokens=6)
    run_stage(evaluate.STAGE, config, {{"hf": Artifact.load(export), "samples": Artifact.load(samples)}}, root)
"""


def test_a_killed_evaluation_goes_on_and_gives_the_same_bytes(made, tmp_path, monkeypatch):
    inputs, undisturbed = made
    paths = [str(inputs["samples"].dir), str(inputs["hf"].dir), str(tmp_path)]
    command = [sys.executable, "-c", textwrap.dedent(KILLED_RUN.format(paths=paths))]
    killed = subprocess.run(command, cwd=os.getcwd(), capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (work,) = (tmp_path / "scratch").glob("evaluate-*[0-9a-f]")
    assert sorted(p.name for p in (work / "answers").glob("[0-9]*")) == ["00000.jsonl", "00001.jsonl"]
    before = {p.name: p.stat().st_mtime_ns for p in (work / "answers").glob("[0-9]*")}
    monkeypatch.setattr(evaluate, "WINDOW", 4)
    again = run_stage(STAGE, CONFIG, inputs, tmp_path).artifact
    assert before.items() <= {p.name: p.stat().st_mtime_ns for p in (again.dir / "answers").iterdir()}.items()
    assert _tree(again.dir) == _tree(undisturbed.dir)


def test_batch_size_does_not_change_the_artifact(made, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "WINDOW", 4)
    other = run_stage(STAGE, CONFIG, made[0], tmp_path, EvaluateResources(batch_size=1)).artifact
    assert _tree(other.dir) == _tree(made[1].dir)


def test_no_heldout_samples_is_said(tmp_path):
    samples = samples_artifact(tmp_path / "s", [], mixed_samples(1))
    inputs = {"hf": hf_artifact(tmp_path / "e", talkative_hf_dir()), "samples": samples}
    with pytest.raises(InputError, match="no held-out samples"):
        run_stage(STAGE, CONFIG, inputs, tmp_path / "root")


def test_an_export_without_a_model_is_said(tmp_path):
    inputs = _inputs(tmp_path, mixed_samples(1))
    (inputs["hf"].dir / "hf" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no weights"):
        run_stage(STAGE, CONFIG, inputs, tmp_path / "root")
