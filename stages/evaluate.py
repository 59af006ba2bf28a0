"""Answers + held-out samples -> scores.

    predictions.parquet   one row an answer, with the picture it was about
    report.json, report.html

Nothing is generated here: the answers are an artifact of their own, so that other metrics cost no GPU.
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
from stages.evaluate_config import EvaluateConfig, EvaluateResources
from stages.evaluation_report import Evaluation, Gallery, write_evaluation_report
from stages.predictions import Prediction, PredictionsWriter

VERSION = 4  # 2: num_images in predictions.parquet; 3: the answers are another stage's; 4: each subset's own metrics
WINDOW = 64  # samples that are in memory at once, pictures and all


def _run(
    config: EvaluateConfig, inputs: Mapping[str, Artifact], work: Path, resources: EvaluateResources | None
) -> StageOutput:
    """Inputs: "answers", and the "samples" that they answer."""
    resources, samples = resources or EvaluateResources(), inputs["samples"]
    lines = _by_key(local_copy(inputs["answers"].dir / ANSWERS_JSONL))
    skips = Counter(line.skip for said in lines.values() for line in said if isinstance(line, NotAsked))
    evaluation = Evaluation(config.metrics)
    for sample in heldout_samples(samples, config.max_samples_per_subset):
        evaluation.add(image_digests(sample), _predictions(sample, _said(sample, lines, inputs["answers"])))
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
    headlines = {name: asdict(found) for name, found in evaluation.headlines().items()}
    return {"scores": evaluation.table, "counts": evaluation.counts(), "headlines": headlines}


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


def _predictions(sample: Sample, said: Sequence[Line]) -> list[Prediction]:
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
                )
            )
    return found


def _windows(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    while window := list(itertools.islice(samples, WINDOW)):
        yield window


STAGE = Stage("evaluate", VERSION, _run, on_disk=True)
