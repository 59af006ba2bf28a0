"""evaluate: answers and held-out samples -> scores.

    predictions.parquet   one row per answer, with the image of the question
    report.json, report.html

Nothing is generated here: the answers are a separate artifact, so that a change of metrics needs no GPU. Samples with
an image that occurs in the training split are answered and shown, but no score counts them.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dataset_builders.contracts.manifest import read_origins
from dataset_builders.contracts.sample import IMAGE_SLOT, Sample, file_digests
from dataset_builders.errors import InputError
from dataset_builders.storage.store import local_copy
from stages.answer.heldout import ANSWERS_JSONL, GeneratedAnswer, Line, SkippedSample, heldout_samples, read_answers
from stages.contamination.stage import contaminated_keys
from stages.evaluate.answer_pictures import answer_layer, answer_picture
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.evaluation import BOOTSTRAP, Evaluation, by_sample
from stages.evaluate.predictions import PREDICTIONS, Prediction, Scored, predictions_table, writing_predictions
from stages.shared.artifacts.artifact import Artifact, Stage, StageOutput
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.boxes import true_boxes
from stages.shared.chat_format.prompt import PromptFormat
from stages.shared.pages.report import Histogram, Picture, Pictures, Section, Table, write_report
from stages.shared.pages.shown_numbers import show_value
from stages.shared.scoring.names import OVERALL, SCORE
from stages.shared.scoring.subsets import metrics_of
from trainer.contract.names import HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.result import read_heldout

# 2: num_images in predictions.parquet; 3: the answers come from another stage; 4: each subset's own metrics; 5:
# contaminated samples not counted, losses of the references; 6: scores by field; 7: multiple
# choice reads denied, joined and full-width options, and an option's text before a letter that names something else;
# 8: what the images on the page show; subsets are known by their builder and their own name; 9: boxes
VERSION = 9
# Role of the training -> its file with the losses of the model that answers: the trained model, or the model before.
_LOSSES = {"made_by": HELDOUT_JSONL, "start_of": HELDOUT_BASE_JSONL}
log = logging.getLogger("athanor.evaluate")
WINDOW = 64  # samples in memory at a time, including images
_WRONG_PICTURES = 48
_RIGHT_PICTURES = 12
_WRONG_ROWS = 200
_THUMBNAIL_SIDE = 160  # pixels


def evaluate(
    config: EvaluateConfig, inputs: Mapping[str, Artifact], work: Path, resources: StageResources | None
) -> StageOutput:
    """Run the stage. Inputs: "answers", the "samples" that they answer, and optionally "contamination" of those
    samples, and the training, as "made_by" or "start_of"."""
    resources, samples = resources or StageResources(), inputs["samples"]
    lines: dict[str, list[Line]] = {}
    for line in read_answers(local_copy(inputs["answers"].dir / ANSWERS_JSONL)):
        lines.setdefault(line.key, []).append(line)
    skips = Counter(line.skip for group in lines.values() for line in group if isinstance(line, SkippedSample))
    # Empty without a training, or if the training had no held-out bins.
    losses = [inputs[role].dir / name for role, name in _LOSSES.items() if role in inputs]
    origins = read_origins(samples.manifest.stats)
    evaluation = Evaluation(by_sample(row for path in losses[:1] for row in read_heldout(path)))
    contaminated = contaminated_keys(inputs["contamination"].dir) if "contamination" in inputs else {}
    prompt = PromptFormat.model_validate(inputs["answers"].manifest.stats["prompt"])
    several = 0  # answers that should have boxes of several images
    for sample in heldout_samples(samples, None, config.max_samples_per_subset):
        if sample.key not in lines:
            raise InputError(
                f"{inputs['answers'].dir / ANSWERS_JSONL} has no answer to the held-out sample {sample.key}; "
                "score the samples that were asked"
            )
        predictions = _predictions(sample, prompt, lines[sample.key], contaminated.get(sample.key))
        evaluation.add(file_digests(sample), predictions)
        answers = [message for message in sample.messages if message.role == "assistant"]
        several += sum(p.boxes is None and bool(answers[p.turn].boxes) for p in predictions)
    if evaluation.predictions and all(prediction.contaminated for prediction in evaluation.predictions):
        raise InputError(
            f"{samples.dir}: every held-out sample that was answered has a picture that occurs in train or looks "
            "alike, so nothing is left to score; look at the page of the stage contamination, or set "
            "contamination=null to score them"
        )
    metrics = {
        subset: metrics_of(subset, origin, config.metrics, evaluation.num_boxes(subset))
        for subset, origin in origins.items()
    }
    evaluation.score(metrics)
    warnings = [found.line(subset) for subset, found in evaluation.better_readings.items()]
    for line in warnings:
        log.warning("%s", line)
    gallery, num_written = Gallery(), 0
    # Read again, so that no image waits in memory; only the images are used.
    to_write = heldout_samples(samples, None, config.max_samples_per_subset)
    with writing_predictions(work) as writer:
        while window := list(itertools.islice(to_write, WINDOW)):
            rows = [row for sample in window for row in evaluation.of(sample.key)]
            gallery.add(window, rows)
            writer.write_table(predictions_table(window, rows))
            resources.report(num_written := num_written + len(window), len(lines))
    _write_report(work, evaluation, gallery, skips, several)
    headlines = {name: {"metric": s.metrics.headline} | asdict(s.headline) for name, s in evaluation.subsets.items()}
    headlines[OVERALL] = {"metric": SCORE} | asdict(evaluation.overall)
    stats = {"scores": evaluation.table, "counts": evaluation.counts(), "headlines": headlines}
    stats["metrics"] = {subset: asdict(each) for subset, each in metrics.items()}
    fields = {name: scores.fields for name, scores in evaluation.subsets.items() if scores.fields}
    sometimes = {
        "fields": fields,
        "with_contaminated": evaluation.with_contaminated,
        "warnings": warnings,
        "boxes_of_several": several,
    }
    stats |= {name: figures for name, figures in sometimes.items() if figures}
    return StageOutput(skips=dict(sorted(skips.items())), stats=stats)


def _predictions(
    sample: Sample, prompt: PromptFormat, lines: Sequence[Line], contaminated: str | None
) -> list[Prediction]:
    """Return the answers to a sample, with the questions and the reference answers in the form of its prompts."""
    written = prompt.with_boxes(sample)
    places = [place for place, message in enumerate(sample.messages) if message.role == "assistant"]
    predictions = []
    for answer in lines:
        if isinstance(answer, GeneratedAnswer):
            place = places[answer.turn]
            right = written.messages[place]
            reference = right.text.strip()
            predictions.append(
                Prediction(
                    key=sample.key,
                    turn=answer.turn,
                    question=written.messages[place - 1].text.replace(IMAGE_SLOT, "").strip(),
                    reference=reference,
                    references=right.references or (reference,),
                    answer=answer.answer,
                    boxes=true_boxes(sample.messages[place], prompt.boxes, prompt.pixels),
                    stopped=answer.stopped,
                    num_tokens=answer.num_tokens,
                    contaminated=contaminated,
                )
            )
    return predictions


class Gallery:
    """The first images with answers that are not fully right, and a few images with right answers.

    Attributes:
        shown: whether the answer is right -> key and turn -> picture.
    """

    def __init__(self) -> None:
        self.shown: dict[bool, dict[tuple[str, int], Picture]] = {False: {}, True: {}}

    def add(self, window: Sequence[Sample], rows: Sequence[tuple[Prediction, Scored]]) -> None:
        """Keep the images of these samples that the page will show."""
        samples = {sample.key: sample for sample in window}
        for prediction, scored in rows:
            pictures = self.shown[is_right := _is_right(scored)]
            sample = samples[prediction.key]
            if sample.images and len(pictures) < (_RIGHT_PICTURES if is_right else _WRONG_PICTURES):
                pictures[prediction.key, prediction.turn] = _picture(sample, prediction, scored)


def _write_report(
    directory: Path, evaluation: Evaluation, gallery: Gallery, skips: Mapping[str, int], several: int
) -> None:
    """Write report.json: scores, then wrong answers, those with images first, then a few right ones."""
    counts = evaluation.counts()
    summary: dict[str, object] = {SCORE: evaluation.table[OVERALL][SCORE], **counts[OVERALL]}
    if skips:
        summary["left out"] = dict(sorted(skips.items()))
    if several:
        summary["boxes of several pictures"] = f"{several:,} answers, which no score of boxes counts"
    metrics = list(dict.fromkeys(metric for values in evaluation.table.values() for metric in values))
    scores = [[name, *(values.get(metric) for metric in metrics)] for name, values in evaluation.table.items()]
    wrong = [(p, s) for p, s in evaluation.scored() if not _is_right(s)]
    others = [(p, s) for p, s in wrong if (p.key, p.turn) not in gallery.shown[False]]
    columns = ["key", "turn", "question", "reference", "answer", "stopped"]
    rows = [[*(getattr(p, name) for name in columns), s.metric, s.score] for p, s in others[:_WRONG_ROWS]]
    pictures = {is_right: list(shown.values()) for is_right, shown in gallery.shown.items()}
    sections: list[Section] = [
        _headlines(evaluation, counts),
        *_better_readings(evaluation),
        *_contaminated(evaluation, counts),
        Table("All metrics", ["subset", *metrics], scores),
        *_fields(evaluation),
        Pictures(f"Not fully right ({len(wrong)} in all; the first with pictures)", pictures[False]),
        Table(f"Not fully right, {len(rows)} of the {len(others)} others", [*columns, "metric", "score"], rows),
        Pictures("Right answers (the first with pictures)", pictures[True]),
        Histogram("Length of the answers", [p.num_tokens for p in evaluation.predictions], "tokens"),
    ]
    write_report(directory, title="Evaluation", summary=summary, sections=sections)


def _is_right(scored: Scored) -> bool:
    return scored.score is not None and scored.score >= 1


def _headlines(evaluation: Evaluation, counts: Mapping[str, Mapping[str, int]]) -> Table:
    about = [(name, s.metrics.headline, s.headline, s.metrics.reason) for name, s in evaluation.subsets.items()]
    about.append((OVERALL, SCORE, evaluation.overall, "the mean of the subsets' headlines, each counting the same"))
    rows = [
        [name, metric, value.value, f"{show_value(value.low)} to {show_value(value.high)}", *counts[name].values(), why]
        for name, metric, value, why in about
    ]
    level = f"{BOOTSTRAP.level:.0%} interval"
    return Table("Headline of each subset", ["subset", "metric", "value", level, *counts[OVERALL], "why"], rows)


def _better_readings(evaluation: Evaluation) -> list[Table]:
    """Return one table of the subsets whose boxes fit better in another reading; empty if there are none."""
    rows = [
        [name, found.convention, found.iou, found.reading, found.reading_iou]
        for name, found in evaluation.better_readings.items()
    ]
    columns = ["subset", "convention of the model", "mean IoU", "read as", "mean IoU of that"]
    return [Table("Warning: coordinates that fit better in another reading", columns, rows)] if rows else []


def _contaminated(evaluation: Evaluation, counts: Mapping[str, Mapping[str, int]]) -> list[Table]:
    """Return one table of scores that include contaminated samples; empty if there are no such samples."""
    rows = [
        [name, counts[name]["contaminated"], evaluation.table.get(name, {}).get(SCORE), value]
        for name, value in evaluation.with_contaminated.items()
        if counts[name]["contaminated"]
    ]
    title = "Held-out samples with a picture that occurs in train or looks alike, in no score but here"
    return [Table(title, ["subset", "samples", "score", "score with them"], rows)] if rows else []


def _fields(evaluation: Evaluation) -> list[Table]:
    tables = []
    for subset, scores in evaluation.subsets.items():
        for metric, fields in scores.fields.items():
            columns = list(dict.fromkeys(name for values in fields.values() for name in values))
            rows = [[field, *(values[name] for name in columns)] for field, values in fields.items()]
            titles = [name.replace("_", " ") for name in columns]
            tables.append(Table(f"{metric} of {subset} by field", ["field", *titles], rows))
    return tables


def _picture(sample: Sample, prediction: Prediction, scored: Scored) -> Picture:
    caption, truth = _caption(prediction, scored), prediction.boxes
    layers = [] if truth is None else [answer_layer("answer", "answer", prediction.answer, truth)]
    boxed = answer_picture(sample, prediction.turn, truth, layers, caption)
    return boxed or Picture.of_sample(sample.key, sample.images, _THUMBNAIL_SIDE, caption)


def _caption(prediction: Prediction, scored: Scored) -> str:
    answer = prediction.answer if prediction.stopped else f"{prediction.answer} ... (cut)"
    notes = "" if scored.score is None else f"\n{scored.metric} {show_value(scored.score)}"
    if prediction.contaminated is not None:
        is_near = prediction.contaminated == "near"
        notes += "\nlooks like a picture in train" if is_near else f"\noccurs in train ({prediction.contaminated})"
    return f"{prediction.question}\nanswer: {answer}\nreference: {prediction.reference}{notes}\n{prediction.key}"


STAGE = Stage("evaluate", VERSION, evaluate, on_disk=True, digested=(PREDICTIONS,))
