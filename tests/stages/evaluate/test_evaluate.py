"""The evaluate stage: answers matched with their samples, the counts, and the contents of its artifact."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stages.evaluate.stage as evaluate
from dataset_builders.contracts.manifest import Manifest
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from stages.answer.heldout import ANSWERS_JSONL, GeneratedAnswer, SkippedSample, to_line
from stages.answer.transformers_engine import Generator
from stages.contamination.stage import CONTAMINATION, CONTAMINATION_SCHEMA
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.evaluation import HEALTH
from stages.evaluate.predictions import PREDICTIONS_SCHEMA, counted, heldout_fingerprint, read_predictions
from stages.evaluate.stage import STAGE
from stages.shared.artifacts.artifact import Artifact
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.shared.inputs.model_directory import ModelDirectory
from tests.helpers.evaluation import (
    conversation,
    evaluated,
    hf_artifact,
    mixed_samples,
    picture,
    samples_artifact,
    talkative_hf_dir,
)
from tests.helpers.trees import tree_digest
from trainer.contract.names import HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.result import HeldoutRow

CONFIG = EvaluateConfig(max_new_tokens=6)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return an evaluation of mixed samples by a real model, and its inputs."""
    root = tmp_path_factory.mktemp("evaluate")
    train = [conversation("single/00000999", [("<image>Which digit?", "9")], [picture(999)])]
    samples = samples_artifact(root / "samples", mixed_samples(14), train)
    inputs = {"hf": hf_artifact(root / "export", talkative_hf_dir()), "samples": samples}
    return inputs, evaluated(CONFIG, inputs, root / "root")


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
    generator = Generator(ModelDirectory(talkative_hf_dir()))
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
    assert stats["counts"]["overall"] == {"samples": 14, "answers": 20, "pictures": 13, "contaminated": 0}
    assert stats["counts"]["text"] == {"samples": 4, "answers": 4, "pictures": 0, "contaminated": 0}
    assert stats["counts"]["pair"] == {"samples": 3, "answers": 3, "pictures": 6, "contaminated": 0}
    assert list(stats["scores"]) == ["multi", "overall", "pair", "single", "text"]
    assert all(set(scores) == {"exact_match", "score", *HEALTH} for scores in stats["scores"].values())
    report = json.loads((made[1].dir / "report.json").read_text())
    assert report["summary"]["answers"] == 20
    assert (made[1].dir / "report.html").is_file()


def test_scoring_loads_no_model(made, tmp_path, monkeypatch):
    monkeypatch.setattr(Generator, "__init__", None)
    (answers,) = (made[1].dir.parent.parent / "answer").iterdir()
    inputs = {"answers": Artifact.load(answers), "samples": made[0]["samples"]}
    assert tree_digest(run_stage(STAGE, CONFIG, inputs, tmp_path).artifact.dir) == tree_digest(made[1].dir)


def _scored(tmp_path, samples, lines, config=CONFIG, resources=None, **others):
    """Return the evaluation of made-up answers."""
    answers = _artifact(tmp_path / "answers", "answer", "a")
    write_text(answers.dir / ANSWERS_JSONL, "".join(map(to_line, lines)))
    inputs = {"answers": answers, "samples": samples_artifact(tmp_path / "s", samples), **others}
    return run_stage(STAGE, config, inputs, tmp_path / "root", resources).artifact


def _artifact(directory, stage, letter):
    directory.mkdir()
    Manifest(stage=stage, version=1, fingerprint=letter * 16, config={}, parents={}).write(directory)
    return Artifact.load(directory)


def _said(sample, answer, stopped, num_tokens, turn=0):
    return GeneratedAnswer(key=sample.key, turn=turn, answer=answer, stopped=stopped, ids=[7] * num_tokens)


def test_scores_count_right_stopped_and_empty_answers(tmp_path):
    samples = [conversation(f"digits/{i:08d}", [("Which digit?", " 7")]) for i in range(3)]
    samples.append(conversation("other/00000003", [("Which digit?", "Left")]))
    script = (("7", True, 1), ("7 7", False, 6), ("", True, 0), ("left\n", True, 2))
    artifact = _scored(tmp_path, samples, [_said(sample, *said) for sample, said in zip(samples, script)])
    third = pytest.approx(1 / 3)
    assert artifact.manifest.stats["scores"] == {
        "digits": {
            "exact_match": third,
            "score": third,
            "stop_rate": pytest.approx(2 / 3),
            "empty_rate": third,
            "mean_answer_tokens": pytest.approx(7 / 3),
        },
        "other": {
            "exact_match": 1.0,
            "score": 1.0,
            "stop_rate": 1.0,
            "empty_rate": 0.0,
            "mean_answer_tokens": 2.0,
        },
        "overall": {
            "exact_match": 0.5,
            "score": pytest.approx(2 / 3),
            "stop_rate": 0.75,
            "empty_rate": 0.25,
            "mean_answer_tokens": 2.25,
        },
    }
    assert [r["score"] for r in read_predictions(artifact.dir).to_pylist()] == [1.0, 0.0, 0.0, 1.0]


def test_answers_with_any_characters_are_kept(tmp_path):
    said = "a\u2028b\x85c\nd\te \ufffd \U0001f600"
    samples = [conversation("digits/00000000", [("Which digit?", "7")])]
    artifact = _scored(tmp_path, samples, [_said(samples[0], said, True, 9)])
    assert [row["answer"] for row in read_predictions(artifact.dir).to_pylist()] == [said]


def test_the_report_shows_wrong_answers_first(tmp_path):
    samples = [conversation(f"digits/{i:08d}", [("<image>Which?", "7")], [picture(i)]) for i in range(3)]
    artifact = _scored(tmp_path, samples, [_said(sample, text, True, 1) for sample, text in zip(samples, "717")])
    sections = json.loads((artifact.dir / "report.json").read_text())["sections"]
    pictures = [section["images"] for section in sections if section["kind"] == "pictures"]
    assert [len(images) for images in pictures] == [1, 2]
    assert pictures[0][0]["caption"] == "Which?\nanswer: 1\nreference: 7\nexact_match 0\ndigits/00000001"


def test_a_sample_that_could_not_be_asked_is_left_out_and_counted(tmp_path):
    samples = [conversation(f"digits/{i:08d}", [("Which digit?", "7")]) for i in range(2)]
    lines = [_said(samples[0], "7", True, 1), SkippedSample(key=samples[1].key, skip="decode_error", detail="no image")]
    manifest = _scored(tmp_path, samples, lines).manifest
    assert manifest.skips == {"decode_error": 1}
    assert manifest.stats["counts"]["overall"]["samples"] == 1


def test_windows_and_progress_cover_every_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "WINDOW", 2)
    samples, seen = [conversation(f"digits/{i:08d}", [("Which digit?", "7")]) for i in range(5)], []
    resources = StageResources(on_progress=lambda *now: seen.append(now))
    artifact = _scored(tmp_path, samples, [_said(s, "7", True, 1) for s in samples], resources=resources)
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert artifact.manifest.stats["counts"]["overall"]["samples"] == 5


def test_answers_of_other_samples_are_refused(tmp_path):
    samples = [conversation(f"digits/{i:08d}", [("Which digit?", "7")]) for i in range(2)]
    with pytest.raises(InputError, match="no answer to the held-out sample digits/00000001"):
        _scored(tmp_path, samples, [_said(samples[0], "7", True, 1)])


def test_only_what_decides_the_answers_goes_to_their_stage():
    config = EvaluateConfig(max_new_tokens=3, max_samples_per_subset=2, batch_size=8)
    assert config.answer.model_dump().items() <= config.model_dump().items()
    assert type(config.answer) is not EvaluateConfig


def _contamination(directory, **hows):
    """Write a contamination artifact that found these samples; each item is a key's number -> how."""
    found = _artifact(directory, "contamination", "b")
    rows = [{"key": f"digits/{int(number[1:]):08d}", "place": 0, "how": how} for number, how in hows.items()]
    pq.write_table(pa.Table.from_pylist(rows, CONTAMINATION_SCHEMA), directory / CONTAMINATION)
    return found


def _pictured(count):
    return [conversation(f"digits/{i:08d}", [("<image>Which?", "7")], [picture(i)]) for i in range(count)]


@pytest.mark.promise(
    "Held-out images that occur in train, encoded again, resized or cropped by 2% too, count in no score; others that "
    "look alike do; turned or mirrored copies are not looked for."
)
def test_contaminated_samples_are_shown_and_count_in_no_score(tmp_path):
    samples = _pictured(4)
    lines = [_said(sample, text, True, i) for i, (sample, text) in enumerate(zip(samples, "7177"))]
    found = _contamination(tmp_path / "found", n0="pixels", n3="near")
    artifact = _scored(tmp_path, samples, lines, contamination=found)
    stats = artifact.manifest.stats
    assert stats["counts"]["digits"] == {"samples": 2, "answers": 2, "pictures": 2, "contaminated": 2}
    assert stats["scores"]["digits"]["exact_match"] == stats["headlines"]["digits"]["value"] == 0.5
    assert stats["scores"]["overall"]["score"] == stats["headlines"]["overall"]["value"] == 0.5
    assert stats["scores"]["digits"]["mean_answer_tokens"] == 1.5
    assert stats["with_contaminated"] == {"digits": 0.75, "overall": 0.75}
    rows = read_predictions(artifact.dir).to_pylist()
    assert [(r["contaminated"], r["score"]) for r in rows] == [("pixels", 1), (None, 0), (None, 1), ("near", 1)]
    assert [r["key"] for r in counted(read_predictions(artifact.dir)).to_pylist()] == [s.key for s in samples[1:3]]
    sections = json.loads((artifact.dir / "report.json").read_text())["sections"]
    (table,) = [section for section in sections if section["title"].startswith("Held-out samples with a picture")]
    assert table["rows"] == [["digits", 2, 0.5, 0.75], ["overall", 2, 0.5, 0.75]]
    assert "looks like a picture in train" in (artifact.dir / "report.html").read_text()


@pytest.mark.promise(
    "Held-out images that occur in train, encoded again, resized or cropped by 2% too, count in no score; others that "
    "look alike do; turned or mirrored copies are not looked for."
)
def test_a_contaminated_subset_is_counted_and_has_no_score(tmp_path):
    samples = [*_pictured(1), conversation("other/00000000", [("Which?", "7")])]
    found = _contamination(tmp_path / "found", n0="bytes")
    stats = _scored(tmp_path, samples, [_said(s, "7", True, 1) for s in samples], contamination=found).manifest.stats
    assert list(stats["scores"]) == ["other", "overall"]
    assert stats["counts"]["digits"] == {"samples": 0, "answers": 0, "pictures": 0, "contaminated": 1}


@pytest.mark.promise(
    "Held-out images that occur in train, encoded again, resized or cropped by 2% too, count in no score; others that "
    "look alike do; turned or mirrored copies are not looked for."
)
def test_nothing_but_contaminated_samples_is_no_evaluation(tmp_path):
    samples, found = _pictured(1), _contamination(tmp_path / "found", n0="bytes")
    with pytest.raises(InputError, match=r"every held-out sample .* occurs in train.* contamination=null"):
        _scored(tmp_path, samples, [_said(samples[0], "7", True, 1)], contamination=found)


@pytest.mark.parametrize(("role", "name"), [("made_by", HELDOUT_JSONL), ("start_of", HELDOUT_BASE_JSONL)])
def test_the_loss_of_the_references_is_that_of_the_samples_that_count(tmp_path, role, name):
    samples = _pictured(4)  # the trainer did not get the third
    losses = [(0, 0.5, 3), (1, 2.0, 1), (3, 1.0, 4)]
    rows = [HeldoutRow(key=samples[i].key, loss=loss, loss_tokens=tokens) for i, loss, tokens in losses]
    trained = _artifact(tmp_path / "trained", "train", "d")
    write_text(trained.dir / name, "".join(row.model_dump_json() + "\n" for row in rows))
    lines = [_said(sample, "7", True, 1) for sample in samples]
    found = _contamination(tmp_path / "found", n3="bytes")
    scores = _scored(tmp_path, samples, lines, contamination=found, **{role: trained}).manifest.stats["scores"]
    assert scores["digits"]["reference_loss"] == pytest.approx((0.5 * 3 + 2.0) / 4)
    assert scores["overall"]["reference_perplexity"] == pytest.approx(math.exp(3.5 / 4))


def test_a_conversation_that_was_cut_has_the_loss_of_all_its_parts(tmp_path):
    samples = _pictured(2)
    losses = [(f"{samples[0].key}-t0", 0.5, 3), (f"{samples[0].key}-t2", 2.0, 1), (samples[1].key, 1.0, 4)]
    rows = [HeldoutRow(key=key, loss=loss, loss_tokens=tokens) for key, loss, tokens in losses]
    trained = _artifact(tmp_path / "trained", "train", "d")
    write_text(trained.dir / HELDOUT_JSONL, "".join(row.model_dump_json() + "\n" for row in rows))
    lines = [_said(sample, "7", True, 1) for sample in samples]
    scores = _scored(tmp_path, samples, lines, made_by=trained).manifest.stats["scores"]
    assert scores["digits"]["reference_loss"] == pytest.approx((0.5 * 3 + 2.0 + 4.0) / 8)


def test_a_training_without_heldout_bins_has_no_loss_of_the_references(tmp_path):
    samples, trained = _pictured(1), _artifact(tmp_path / "trained", "train", "d")
    artifact = _scored(tmp_path, samples, [_said(samples[0], "7", True, 1)], made_by=trained)
    assert "reference_loss" not in artifact.manifest.stats["scores"]["overall"]


def test_what_scores_are_of_depends_on_what_is_asked_and_counted_alone(tmp_path):
    samples = _pictured(4)

    def name(place, answers="7177", config=CONFIG, of=samples, **others):
        lines = [_said(sample, text, True, i) for i, (sample, text) in enumerate(zip(of, answers))]
        (tmp_path / place).mkdir()
        return heldout_fingerprint(_scored(tmp_path / place, of, lines, config, **others))

    usual = name("first")
    assert name("another place, another model", answers="7777") == usual
    contaminated = _contamination(tmp_path / "found", n0="pixels")
    metrics = {"digits": ["exact_match", "cer"]}
    pictures = [*samples[:3], conversation("digits/00000003", [("<image>Which?", "7")], [picture(9)])]
    questions = [*samples[:3], conversation("digits/00000003", [("<image>Who?", "7")], [picture(3)])]
    answers = [*samples[:3], conversation("digits/00000003", [("<image>Which?", "8")], [picture(3)])]
    others = [
        name("fewer", of=samples[:3]),
        name("pictures", of=pictures),
        name("questions", of=questions),
        name("answers", of=answers),
        name("metrics", config=EvaluateConfig(max_new_tokens=6, metrics=metrics)),
        name("contaminated", contamination=contaminated),
    ]
    assert len({usual, *others}) == 7
