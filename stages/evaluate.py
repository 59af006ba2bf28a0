"""HF directory + held-out samples -> answers and scores.

    answers/00000.jsonl   what was generated for one window of samples, in their order
    predictions.parquet   one row an answer, with the picture it was about
    report.json, report.html

Every assistant turn of a held-out sample is answered, after the turns before it with their reference answers. A window
is written whole, and a rerun keeps the windows it finds. Batches never cross a window, so that what comes out does not
depend on where an earlier try was stopped.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import Field

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_text
from dataset_builders.contracts.sample import IMAGE_SLOT, Sample, SkipSample
from dataset_builders.contracts.sample_record import from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.contracts.store import local_dir
from dataset_builders.contracts.strict import StrictModel
from stages.artifact import Artifact, Stage, StageOutput
from stages.evaluation_report import Evaluation, write_evaluation_report
from stages.generate import EncodedImages, Generator, Prompt
from stages.predictions import Prediction, PredictionsWriter
from trainer.contract import HF_EXPORT

VERSION = 2  # 2: num_images in predictions.parquet
ANSWERS = "answers"
WINDOW = 64  # samples; what a killed evaluation has to do again at most


class EvaluateConfig(StrictModel):
    """Identity: what is asked of the model."""

    max_new_tokens: int = Field(gt=0, le=32768, description="an answer is cut there and counts as not stopped")
    max_samples_per_subset: int | None = Field(
        default=None, gt=0, description="held-out samples of a subset that are used, the first ones; none: all of them"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateResources:
    """Execution: how much is generated at once.

    Attributes:
        batch_size: answers generated side by side, at most.
        batch_tokens: prompt tokens of a batch, padding included, at most (one prompt may be longer).
        on_progress: called as (done, total) in held-out samples after each window; done never goes back.
    """

    batch_size: int = 64
    batch_tokens: int = 16384
    on_progress: Callable[[int, int], None] | None = None

    def report(self, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(done, total)


@dataclass(frozen=True, slots=True)
class _Question:
    """One assistant turn that is to be answered."""

    sample: Sample
    turn: int
    text: str
    reference: str
    prompt: Prompt


def _run(
    config: EvaluateConfig, inputs: Mapping[str, Artifact], work: Path, resources: EvaluateResources | None
) -> StageOutput:
    resources = resources or EvaluateResources()
    samples, model = inputs["samples"], _LazyGenerator(local_dir(inputs["hf"].dir / HF_EXPORT))
    total = _count(samples, config.max_samples_per_subset)
    if not total:
        raise InputError(f"{samples.dir} has no held-out samples to evaluate on; raise convert.heldout_fraction")
    evaluation, skips = Evaluation(), Counter()
    (work / ANSWERS).mkdir(exist_ok=True)
    with PredictionsWriter(work) as writer:
        for number, window in enumerate(_windows(heldout_samples(samples, config.max_samples_per_subset))):
            path = work / ANSWERS / f"{number:05d}.jsonl"
            if not path.is_file():
                write_text(path, _answer_window(model, window, config, resources))
            predictions, reasons = _read_window(path)
            skips.update(reasons)
            evaluation.add(window, predictions)
            writer.write(window, predictions)
            resources.report(evaluation.num_samples + skips.total(), total)
    if not evaluation.predictions:
        raise InputError(f"{samples.dir}: none of {total} held-out samples can be asked ({dict(skips)})")
    stats = {"scores": evaluation.scores(), "counts": evaluation.counts()}
    write_evaluation_report(work, evaluation, skips)
    return StageOutput(skips=dict(sorted(skips.items())), stats=stats)


def heldout_samples(samples: Artifact, max_per_subset: int | None = None) -> Iterator[Sample]:
    """The held-out samples of a convert artifact in shard order, at most the first `max_per_subset` of each subset."""
    taken: Counter[str] = Counter()
    for entry in samples.manifest.shards:
        if entry.split != "heldout":
            continue
        for key, fields in iter_records(samples.dir / entry.name, entry.sha256):
            sample = from_fields(key, fields)
            if max_per_subset is None or taken[sample.subset] < max_per_subset:
                taken[sample.subset] += 1
                yield sample


def _count(samples: Artifact, max_per_subset: int | None) -> int:
    if max_per_subset is None:
        return sum(entry.num_samples for entry in samples.manifest.shards if entry.split == "heldout")
    return sum(1 for _ in heldout_samples(samples, max_per_subset))


def _windows(samples: Iterator[Sample]) -> Iterator[list[Sample]]:
    while window := list(itertools.islice(samples, WINDOW)):
        yield window


class _LazyGenerator:
    """Loads the model at the first question, so that an evaluation whose windows are all there needs none."""

    def __init__(self, hf_dir: Path) -> None:
        self._hf_dir = hf_dir
        self._generator: Generator | None = None

    def get(self) -> Generator:
        self._generator = self._generator or Generator(self._hf_dir)
        return self._generator


def _answer_window(
    model: _LazyGenerator, window: Sequence[Sample], config: EvaluateConfig, resources: EvaluateResources
) -> str:
    """The lines of a window's file: predictions, and {key, skip, detail} for samples that cannot be asked."""
    generator = model.get()
    questions: list[_Question] = []
    skipped: list[dict[str, str]] = []
    for sample in window:
        try:
            questions += _questions(generator, sample)
        except SkipSample as error:
            skipped.append({"key": sample.key, "skip": error.reason, "detail": error.detail})
    answers: dict[int, Prediction] = {}
    for batch in _batches([len(q.prompt.input_ids) for q in questions], resources):
        generated = generator.generate([questions[i].prompt for i in batch], config.max_new_tokens)
        for i, answer in zip(batch, generated):
            question = questions[i]
            answers[i] = Prediction(
                key=question.sample.key,
                turn=question.turn,
                question=question.text,
                reference=question.reference,
                answer=answer.text,
                stopped=answer.stopped,
                num_tokens=answer.num_tokens,
            )
    rows = [*skipped, *(asdict(answers[i]) for i in range(len(questions)))]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _read_window(path: Path) -> tuple[list[Prediction], list[str]]:
    """Predictions, and the reasons of samples that were left out."""
    # Not splitlines(): an answer may hold U+2028 and other characters that it takes for line ends.
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    return [Prediction(**row) for row in rows if "skip" not in row], [row["skip"] for row in rows if "skip" in row]


def _questions(generator: Generator, sample: Sample) -> list[_Question]:
    """One for each assistant turn of a sample, numbered from 0."""
    images = generator.encode_images(sample.images)
    questions: list[_Question] = []
    for place, message in enumerate(sample.messages):
        if message.role != "assistant":
            continue
        before = sample.messages[:place]
        shown = sum(m.text.count(IMAGE_SLOT) for m in before)
        prompt = generator.encode_prompt(before, EncodedImages(images.grids[:shown], images.patches[:shown]))
        asked = before[-1].text.replace(IMAGE_SLOT, "").strip()
        questions.append(_Question(sample, len(questions), asked, message.text.strip(), prompt))
    return questions


def _batches(lengths: Sequence[int], resources: EvaluateResources) -> Iterator[list[int]]:
    """Places of prompts that are generated together: like lengths, the longest first."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[batch[0]] if batch else lengths[place]
        full = len(batch) == resources.batch_size or (len(batch) + 1) * longest > resources.batch_tokens
        if batch and full:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


STAGE = Stage("evaluate", VERSION, _run, on_disk=True)
