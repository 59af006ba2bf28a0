"""The evaluate stage: answers matched with their samples, the counts, and the contents of its artifact."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stages.evaluate.stage as evaluate
from dataset_builders.contracts.boxes import BOX_SLOT, Box, BoxPlace
from dataset_builders.contracts.sample import Message, Sample
from dataset_builders.errors import InputError
from dataset_builders.storage.files import write_text
from stages.answer.heldout import GeneratedAnswer, SkippedSample
from stages.contamination.stage import CONTAMINATION, CONTAMINATION_SCHEMA
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.evaluation import HEALTH, health
from stages.evaluate.predictions import PREDICTIONS_SCHEMA, counted, heldout_fingerprint, read_predictions
from stages.evaluate.stage import STAGE
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.boxes import with_boxes_written
from stages.shared.chat_format.config import BoxFormat
from tests.helpers.evaluation import PROMPT, answers_artifact, conversation, mixed_samples, picture, samples_artifact
from tests.helpers.trees import tree_digest
from tests.stages.artifacts import stage_artifact
from trainer.contract.names import HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.result import HeldoutRow

CONFIG = EvaluateConfig(max_new_tokens=6)
SAID = "a\u2028b\x85c\nd\te \ufffd \U0001f600"


def _said(sample, answer, stopped=True, num_tokens=1, turn=0):
    return GeneratedAnswer(key=sample.key, turn=turn, answer=answer, stopped=stopped, ids=[7] * num_tokens)


def _scored(tmp_path, samples, lines, config=CONFIG, resources=None, **others):
    """Return the evaluation of made-up answers. A text says the same to each sample."""
    lines = [_said(sample, lines) for sample in samples] if isinstance(lines, str) else lines
    answers = answers_artifact(tmp_path / "answers", lines)
    train = [conversation("single/00000999", [("<image>Which digit?", "9")], [picture(999)])]
    inputs = {"answers": answers, "samples": samples_artifact(tmp_path / "s", samples, train), **others}
    return run_stage(STAGE, config, inputs, tmp_path / "root", resources).artifact


def _digits(count):
    return [conversation(f"digits/{i:08d}", [("Which digit?", "7")]) for i in range(count)]


def _mixed(tmp_path):
    samples = mixed_samples(14)
    lines = [_said(s, SAID, turn=turn) for s in samples for turn in range(len(s.messages) // 2)]
    return _scored(tmp_path, samples, lines)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return an evaluation of samples of every kind, whose answers hold any characters."""
    return _mixed(tmp_path_factory.mktemp("evaluate"))


def test_every_assistant_turn_is_a_row_with_its_question_and_the_first_picture_untouched(mixed):
    table = read_predictions(mixed.dir)
    rows = table.to_pylist()
    wanted = [
        (sample.key, turn, message.text, SAID, sample.images[0] if sample.images else None)
        for sample in mixed_samples(14)
        for turn, message in enumerate(m for m in sample.messages if m.role == "assistant")
    ]
    assert [(r["key"], r["turn"], r["reference"], r["answer"], r["image"]) for r in rows] == wanted
    assert [r["question"] for r in rows if r["key"] == "multi/00000003"] == [
        *("Which digit is in the picture?", "How many strokes?", "Again?")
    ]
    assert table.schema == PREDICTIONS_SCHEMA


def test_counts_and_scores_are_in_the_manifest(mixed):
    stats = mixed.manifest.stats
    assert stats["counts"]["overall"] == {"samples": 14, "answers": 20, "pictures": 13, "contaminated": 0}
    assert stats["counts"]["text"] == {"samples": 4, "answers": 4, "pictures": 0, "contaminated": 0}
    assert stats["counts"]["pair"] == {"samples": 3, "answers": 3, "pictures": 6, "contaminated": 0}
    assert list(stats["scores"]) == ["multi", "overall", "pair", "single", "text"]
    assert all(set(scores) == {"exact_match", "score", *HEALTH} for scores in stats["scores"].values())
    report = json.loads((mixed.dir / "report.json").read_text())
    assert report["summary"]["answers"] == 20
    assert (mixed.dir / "report.html").is_file()


def test_the_same_answers_give_the_same_bytes(mixed, tmp_path):
    assert tree_digest(_mixed(tmp_path).dir) == tree_digest(mixed.dir)


def test_scores_count_right_stopped_and_empty_answers(tmp_path):
    samples = [*_digits(3), conversation("other/00000003", [("Which digit?", "Left")])]
    script = (("7", True, 1), ("7 7", False, 6), ("", True, 0), ("left\n", True, 2))
    artifact = _scored(tmp_path, samples, [_said(sample, *said) for sample, said in zip(samples, script)])
    third = pytest.approx(1 / 3)
    names = ("exact_match", "score", "stop_rate", "empty_rate", "mean_answer_tokens")
    assert {subset: [found[name] for name in names] for subset, found in artifact.manifest.stats["scores"].items()} == {
        "digits": [third, third, pytest.approx(2 / 3), third, pytest.approx(7 / 3)],
        "other": [1.0, 1.0, 1.0, 0.0, 2.0],
        "overall": [0.5, pytest.approx(2 / 3), 0.75, 0.25, 2.25],
    }
    assert [r["score"] for r in read_predictions(artifact.dir).to_pylist()] == [1.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError, match="no answers"):
        health([])


def test_the_report_shows_wrong_answers_first(tmp_path):
    samples = _pictured(3)
    artifact = _scored(tmp_path, samples, [_said(sample, text) for sample, text in zip(samples, "717")])
    sections = json.loads((artifact.dir / "report.json").read_text())["sections"]
    pictures = [section["images"] for section in sections if section["kind"] == "pictures"]
    assert [len(images) for images in pictures] == [1, 2]
    assert pictures[0][0]["caption"] == "Which?\nanswer: 1\nreference: 7\nexact_match 0\ndigits/00000001"


def test_a_sample_that_could_not_be_asked_is_left_out_and_counted(tmp_path):
    samples = _digits(2)
    lines = [_said(samples[0], "7"), SkippedSample(key=samples[1].key, skip="decode_error", detail="no image")]
    manifest = _scored(tmp_path, samples, lines).manifest
    assert manifest.skips == {"decode_error": 1}
    assert manifest.stats["counts"]["overall"]["samples"] == 1


def test_windows_and_progress_cover_every_sample(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "WINDOW", 2)
    seen = []
    resources = StageResources(on_progress=lambda *now: seen.append(now))
    artifact = _scored(tmp_path, _digits(5), "7", resources=resources)
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert artifact.manifest.stats["counts"]["overall"]["samples"] == 5


def test_answers_of_other_samples_are_refused(tmp_path):
    samples = _digits(2)
    with pytest.raises(InputError, match="no answer to the held-out sample digits/00000001"):
        _scored(tmp_path, samples, [_said(samples[0], "7")])


def test_only_what_decides_the_answers_goes_to_their_stage():
    config = EvaluateConfig(max_new_tokens=3, max_samples_per_subset=2, batch_size=8)
    assert config.answer.model_dump().items() <= config.model_dump().items()
    assert type(config.answer) is not EvaluateConfig


def _contamination(directory, **hows):
    """Write a contamination artifact that found these samples; each item is a key's number -> how."""
    found = stage_artifact(directory, "contamination", fingerprint="b" * 16)
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
def test_a_contaminated_subset_has_no_score_and_nothing_else_is_no_evaluation(tmp_path):
    samples = [*_pictured(1), conversation("other/00000000", [("Which?", "7")])]
    found = _contamination(tmp_path / "found", n0="bytes")
    stats = _scored(tmp_path, samples, "7", contamination=found).manifest.stats
    assert list(stats["scores"]) == ["other", "overall"]
    assert stats["counts"]["digits"] == {"samples": 0, "answers": 0, "pictures": 0, "contaminated": 1}
    with pytest.raises(InputError, match=r"every held-out sample .* occurs in train.* contamination=null"):
        _scored(tmp_path / "alone", samples[:1], "7", contamination=found)


def _trained(tmp_path, name, losses):
    """Write a training that measured these losses of references: key, loss, tokens."""
    rows = [HeldoutRow(key=key, loss=loss, loss_tokens=tokens) for key, loss, tokens in losses]
    trained = stage_artifact(tmp_path / "trained", "train", fingerprint="d" * 16)
    write_text(trained.dir / name, "".join(row.model_dump_json() + "\n" for row in rows))
    return trained


@pytest.mark.parametrize(("role", "name"), [("made_by", HELDOUT_JSONL), ("start_of", HELDOUT_BASE_JSONL)])
def test_the_loss_of_the_references_is_that_of_the_samples_that_count(tmp_path, role, name):
    samples = _pictured(4)  # the trainer did not get the third
    losses = [(samples[0].key, 0.5, 3), (samples[1].key, 2.0, 1), (samples[3].key, 1.0, 4)]
    others = {role: _trained(tmp_path, name, losses), "contamination": _contamination(tmp_path / "found", n3="bytes")}
    scores = _scored(tmp_path, samples, "7", **others).manifest.stats["scores"]
    assert scores["digits"]["reference_loss"] == pytest.approx((0.5 * 3 + 2.0) / 4)
    assert scores["overall"]["reference_perplexity"] == pytest.approx(math.exp(3.5 / 4))


def test_a_conversation_that_was_cut_has_the_loss_of_all_its_parts(tmp_path):
    samples = _pictured(2)
    losses = [(f"{samples[0].key}-t0", 0.5, 3), (f"{samples[0].key}-t2", 2.0, 1), (samples[1].key, 1.0, 4)]
    made_by = _trained(tmp_path, HELDOUT_JSONL, losses)
    scores = _scored(tmp_path, samples, "7", made_by=made_by).manifest.stats["scores"]
    assert scores["digits"]["reference_loss"] == pytest.approx((0.5 * 3 + 2.0 + 4.0) / 8)


def test_a_training_without_heldout_bins_has_no_loss_of_the_references(tmp_path):
    artifact = _scored(tmp_path, _pictured(1), "7", made_by=stage_artifact(tmp_path / "trained", "train"))
    assert "reference_loss" not in artifact.manifest.stats["scores"]["overall"]


def test_what_scores_are_of_depends_on_what_is_asked_and_counted_alone(tmp_path):
    samples = _pictured(4)

    def name(place, answers="7177", config=CONFIG, of=samples, **others):
        lines = [_said(sample, text, True, i) for i, (sample, text) in enumerate(zip(of, answers))]
        return heldout_fingerprint(_scored(tmp_path / place, of, lines, config, **others))

    usual = name("first")
    assert name("another place, another model", answers="7777") == usual
    contaminated = _contamination(tmp_path / "found", n0="pixels")
    metrics = {"digits": ["exact_match", "cer"]}
    pictures = [*samples[:3], conversation("digits/00000003", [("<image>Which?", "7")], [picture(9)])]
    questions = [*samples[:3], conversation("digits/00000003", [("<image>Who?", "7")], [picture(3)])]
    answers = [*samples[:3], conversation("digits/00000003", [("<image>Which?", "8")], [picture(3)])]
    others = [
        *(name("fewer", of=samples[:3]), name("pictures", of=pictures)),
        *(name("questions", of=questions), name("answers", of=answers)),
        name("metrics", config=EvaluateConfig(max_new_tokens=6, metrics=metrics)),
        name("contaminated", contamination=contaminated),
    ]
    assert len({usual, *others}) == 7


def _shapes(count):
    """Return questions about one box each, and about all boxes of an image."""
    samples = []
    for number in range(count):
        across, down = 40 * (number % 8), 30 * (number % 5)
        boxes = (Box(across, down, across + 60, down + 45, "circle"), Box(300, 200, 340, 250, "square"))
        for subset, each in (("one", boxes[:1]), ("all", boxes)):
            place = BoxPlace(image=0, size=(400, 300), boxes=each, is_list=subset == "all")
            turns = (
                Message(role="user", text="<image>Where?"),
                Message(role="assistant", text=BOX_SLOT, boxes=(place,)),
            )
            samples.append(Sample(key=f"{subset}/{number:08d}", images=(picture(2 * number),), messages=turns))
    return samples


@pytest.mark.promise(
    "An evaluation warns where the coordinates of answers fit clearly better in another convention, with both scores, "
    "and not where a model has only learnt nothing."
)
@pytest.mark.parametrize("convention", ["relative_1000", "resized_pixels"])
def test_boxes_are_scored_by_boxes_and_another_convention_is_warned_of(tmp_path, caplog, convention):
    samples = _shapes(20)
    # As a model would answer that was trained on this convention; it is asked for relative_1000.
    said = [with_boxes_written(sample, BoxFormat(convention=convention), PROMPT.pixels) for sample in samples]
    artifact = _scored(tmp_path, samples, [_said(sample, sample.messages[-1].text) for sample in said])
    stats, sections = artifact.manifest.stats, json.loads((artifact.dir / "report.json").read_text())["sections"]
    assert {name: each["metric"] for name, each in stats["headlines"].items()} == {
        "all": "box_f1",
        "one": "acc_iou50",
        "overall": "score",
    }
    warned = [section for section in sections if section["title"].startswith("Warning")]
    if convention == "relative_1000":
        assert [stats["scores"][name]["score"] for name in ("one", "all")] == [1, 1]
        assert not warned and "warnings" not in stats and not caplog.records
        return
    assert max(stats["scores"][name]["score"] for name in ("one", "all")) < 0.3
    assert [line.split(":")[0] for line in stats["warnings"]] == ["all", "one"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == stats["warnings"]
    (table,) = warned
    for line, row in zip(stats["warnings"], table["rows"]):
        own, other = stats["scores"][row[0]].get("iou", row[2]), row[4]
        assert row[1:] == ["relative_1000", pytest.approx(own), "resized_pixels", other] and other > 0.9
        assert f"read as resized_pixels, mean IoU {other:.3f}, than as relative_1000, {own:.3f}," in line
