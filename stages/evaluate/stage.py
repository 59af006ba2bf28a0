"""evaluate: answers and held-out samples -> scores.

    predictions.parquet   one row per answer, with the image of the question
    report.json, report.html

Nothing is generated here: the answers are a separate artifact, so that a change of metrics needs no GPU. Samples with
an image that occurs in the training split are answered and shown, but no score counts them.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dataset_builders.contracts.sample import IMAGE_SLOT, Sample, image_digests
from dataset_builders.errors import InputError
from dataset_builders.storage.store import local_copy
from stages.answer.heldout import ANSWERS_JSONL, GeneratedAnswer, Line, SkippedSample, heldout_samples, read_answers
from stages.contamination.stage import contaminated_keys
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.evaluation import Evaluation
from stages.evaluate.predictions import PREDICTIONS, Prediction, predictions_table, writing_predictions
from stages.evaluate.reference_loss import by_sample
from stages.evaluate.report import Gallery, write_evaluation_report
from stages.shared.artifacts.artifact import Artifact, Stage, StageOutput
from stages.shared.artifacts.workers import StageResources
from stages.shared.scoring.summary import SCORE
from trainer.contract.names import HELDOUT_BASE_JSONL, HELDOUT_JSONL
from trainer.contract.result import HeldoutRow, read_heldout

# 2: num_images in predictions.parquet; 3: the answers come from another stage; 4: each subset's own metrics; 5:
# contaminated samples not counted, losses of the references; 6: scores by field; 7: multiple
# choice reads denied, joined and full-width options, and an option's text before a letter that names something else
VERSION = 7
# Role of the training -> its file with the losses of the model that answers: the trained model, or the model before.
_LOSSES = {"made_by": HELDOUT_JSONL, "start_of": HELDOUT_BASE_JSONL}
WINDOW = 64  # samples in memory at a time, including images


def _run(
    config: EvaluateConfig, inputs: Mapping[str, Artifact], work: Path, resources: StageResources | None
) -> StageOutput:
    """Run the stage. Inputs: "answers", the "samples" that they answer, and optionally "contamination" of those
    samples, and the training, as "made_by" or "start_of"."""
    resources, samples = resources or StageResources(), inputs["samples"]
    lines: dict[str, list[Line]] = {}
    for line in read_answers(local_copy(inputs["answers"].dir / ANSWERS_JSONL)):
        lines.setdefault(line.key, []).append(line)
    skips = Counter(line.skip for group in lines.values() for line in group if isinstance(line, SkippedSample))
    evaluation = Evaluation(config.metrics, _losses(inputs))
    contaminated = contaminated_keys(inputs["contamination"].dir) if "contamination" in inputs else {}
    for sample in heldout_samples(samples, config.max_samples_per_subset):
        predictions = _predictions(sample, _lines_of(sample, lines, inputs["answers"]), contaminated.get(sample.key))
        evaluation.add(image_digests(sample), predictions)
    _check_counted(evaluation, samples)
    evaluation.score()
    gallery, num_written = Gallery(), 0
    to_write = heldout_samples(samples, config.max_samples_per_subset)
    with writing_predictions(work) as writer:
        while window := list(itertools.islice(to_write, WINDOW)):
            rows = [row for sample in window for row in evaluation.of(sample.key)]
            gallery.add(window, rows)
            writer.write_table(predictions_table(window, rows))
            resources.report(num_written := num_written + len(window), len(lines))
    write_evaluation_report(work, evaluation, gallery, skips)
    return StageOutput(skips=dict(sorted(skips.items())), stats=_stats(evaluation))


def _stats(evaluation: Evaluation) -> dict[str, object]:
    """Return plain numbers: scores and counts of every subset, and the headline with its interval."""
    metrics = {name: metric for name, (metric, _) in evaluation.names().items()}
    headlines = {name: {"metric": metrics.get(name, SCORE)} | asdict(v) for name, v in evaluation.headlines().items()}
    stats = {"scores": evaluation.table, "counts": evaluation.counts(), "headlines": headlines}
    sometimes = {"fields": evaluation.fields(), "with_contaminated": evaluation.with_contaminated}
    return stats | {name: figures for name, figures in sometimes.items() if figures}


def _losses(inputs: Mapping[str, Artifact]) -> dict[str, HeldoutRow]:
    """Return key of a sample -> its loss; empty without a training, or if the training had no held-out bins."""
    paths = [inputs[role].dir / name for role, name in _LOSSES.items() if role in inputs]
    return by_sample(row for path in paths[:1] for row in read_heldout(path))


def _check_counted(evaluation: Evaluation, samples: Artifact) -> None:
    if evaluation.predictions and all(prediction.contaminated for prediction in evaluation.predictions):
        raise InputError(
            f"{samples.dir}: every held-out sample that was answered has a picture that occurs in train or looks "
            "alike, so nothing is left to score; look at the page of the stage contamination, or set "
            "contamination=null to score them"
        )


def _lines_of(sample: Sample, lines: Mapping[str, list[Line]], answers: Artifact) -> list[Line]:
    if sample.key not in lines:
        raise InputError(
            f"{answers.dir / ANSWERS_JSONL} has no answer to the held-out sample {sample.key}; "
            "score the samples that were asked"
        )
    return lines[sample.key]


def _predictions(sample: Sample, lines: Sequence[Line], contaminated: str | None) -> list[Prediction]:
    """Return the answers to a sample, with the questions and the reference answers."""
    places = [place for place, message in enumerate(sample.messages) if message.role == "assistant"]
    predictions = []
    for answer in lines:
        if isinstance(answer, GeneratedAnswer):
            right = sample.messages[places[answer.turn]]
            reference = right.text.strip()
            predictions.append(
                Prediction(
                    key=sample.key,
                    turn=answer.turn,
                    question=sample.messages[places[answer.turn] - 1].text.replace(IMAGE_SLOT, "").strip(),
                    reference=reference,
                    references=right.references or (reference,),
                    answer=answer.answer,
                    stopped=answer.stopped,
                    num_tokens=answer.num_tokens,
                    contaminated=contaminated,
                )
            )
    return predictions


STAGE = Stage("evaluate", VERSION, _run, on_disk=True, digested=(PREDICTIONS,))
