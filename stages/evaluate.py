"""Answers + held-out samples -> scores.

    predictions.parquet   one row an answer, with the picture it was about
    report.json, report.html

Nothing is generated here: the answers are an artifact of their own, so that other metrics cost no GPU. Samples with a
picture that occurs in train are answered and shown, but no score counts them.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.sample import IMAGE_SLOT, Sample, image_digests
from dataset_builders.contracts.store import local_copy
from stages.answer_plan import heldout_samples
from stages.answers import ANSWERS_JSONL, GeneratedAnswer, Line, NotAsked, read_answers
from stages.artifact import Artifact, Stage, StageOutput
from stages.contamination import contaminated_keys
from stages.evaluate_config import EvaluateConfig, EvaluateResources
from stages.evaluation_report import Evaluation, Gallery, write_evaluation_report
from stages.predictions import Prediction, PredictionsWriter
from stages.reference_loss import losses_of
from stages.scoring.summary import SCORE
from trainer.contract import HELDOUT_BASE_JSONL, HELDOUT_JSONL, HeldoutRow

# 2: num_images in predictions.parquet; 3: the answers are another stage's; 4: each subset's own metrics;
# 5: contaminated samples apart, losses of the references; 6: scores by field
VERSION = 6
# Role of the training -> what it wrote of the model whose answers these are: the one it made, or the one it began with.
_LOSSES = {"made_by": HELDOUT_JSONL, "start_of": HELDOUT_BASE_JSONL}
WINDOW = 64  # samples that are in memory at once, pictures and all


def _run(
    config: EvaluateConfig, inputs: Mapping[str, Artifact], work: Path, resources: EvaluateResources | None
) -> StageOutput:
    """Inputs: "answers", the "samples" that they answer; where there are such, "contamination" of those samples, and
    the training, as "made_by" or "start_of"."""
    resources, samples = resources or EvaluateResources(), inputs["samples"]
    lines = _by_key(local_copy(inputs["answers"].dir / ANSWERS_JSONL))
    skips = Counter(line.skip for said in lines.values() for line in said if isinstance(line, NotAsked))
    evaluation = Evaluation(config.metrics, _losses(inputs))
    known = contaminated_keys(inputs["contamination"].dir) if "contamination" in inputs else {}
    for sample in heldout_samples(samples, config.max_samples_per_subset):
        said = _said(sample, lines, inputs["answers"])
        evaluation.add(image_digests(sample), _predictions(sample, said, known.get(sample.key)))
    _check_counted(evaluation, samples)
    evaluation.score()
    gallery, done = Gallery(), 0
    with PredictionsWriter(work) as writer:
        for window in _windows(heldout_samples(samples, config.max_samples_per_subset)):
            rows = [row for sample in window for row in evaluation.of(sample.key)]
            gallery.add(window, rows)
            writer.write(window, rows)
            resources.report(done := done + len(window), len(lines))
    write_evaluation_report(work, evaluation, gallery, skips)
    return StageOutput(skips=dict(sorted(skips.items())), stats=_stats(evaluation))


def _stats(evaluation: Evaluation) -> dict[str, object]:
    """Plain numbers: scores and counts of every subset, and the headline with its interval."""
    metrics = {name: metric for name, (metric, _) in evaluation.names().items()}
    headlines = {name: {"metric": metrics.get(name, SCORE)} | asdict(v) for name, v in evaluation.headlines().items()}
    stats = {"scores": evaluation.table, "counts": evaluation.counts(), "headlines": headlines}
    sometimes = {"fields": evaluation.fields(), "with_contaminated": evaluation.with_contaminated}
    return stats | {name: found for name, found in sometimes.items() if found}


def _losses(inputs: Mapping[str, Artifact]) -> dict[str, HeldoutRow]:
    return next((losses_of(inputs[role].dir / name) for role, name in _LOSSES.items() if role in inputs), {})


def _check_counted(evaluation: Evaluation, samples: Artifact) -> None:
    if evaluation.predictions and all(prediction.contaminated for prediction in evaluation.predictions):
        raise InputError(
            f"{samples.dir}: every held-out sample that was answered has a picture that occurs in train, so nothing is "
            "left to score; look at the page of the stage contamination, or set contamination=null to score them"
        )


def _by_key(path: Path) -> dict[str, list[Line]]:
    """Key of the sample -> its lines, in the order of its turns."""
    found: dict[str, list[Line]] = {}
    for line in read_answers(path):
        found.setdefault(line.key, []).append(line)
    return found


def _said(sample: Sample, lines: Mapping[str, list[Line]], answers: Artifact) -> list[Line]:
    said = lines.get(sample.key)
    if said is None:
        raise InputError(
            f"{answers.dir / ANSWERS_JSONL} has no answer to the held-out sample {sample.key}; "
            "score the samples that were asked"
        )
    return said


def _predictions(sample: Sample, said: Sequence[Line], contaminated: str | None) -> list[Prediction]:
    """The answers to a sample beside what was asked and what the data says."""
    places = [place for place, message in enumerate(sample.messages) if message.role == "assistant"]
    found = []
    for answer in said:
        if isinstance(answer, GeneratedAnswer):
            right = sample.messages[places[answer.turn]]
            reference = right.text.strip()
            found.append(
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
    return found


def _windows(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    while window := list(itertools.islice(samples, WINDOW)):
        yield window


STAGE = Stage("evaluate", VERSION, _run, on_disk=True)
