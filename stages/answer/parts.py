"""The answering of a plan's parts, in the stage's own process or in a worker.

    parts/00003.jsonl   {"number": 17, "key": ..., "turn": ...}: one part's lines, sorted by the question's number
    parts/00003.json    the part's seconds (in the process that answered it), answers and tokens; not in the result

A part's file is written atomically when the whole part is answered, and a rerun keeps it. While the model answers,
threads read, decode and encode the next questions.
"""

import collections
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from dataset_builders.contracts.sample import from_fields
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.storage.files import read_sealed, write_sealed
from dataset_builders.storage.store import Location, local_copy
from stages.answer.config import AnswerConfig
from stages.answer.engine import Engine, EngineSettings, Prepared, Request, make_engine
from stages.answer.plan import PLAN_JSONL, Question, cut_groups, cut_parts, read_plan
from stages.answer.records import GeneratedAnswer, Line, SkippedSample, line_of, rows_of
from stages.shared.chat_format.prompt import PromptFormat
from stages.shared.inputs.adapter_directory import AdapterDirectory, open_model_to_answer
from stages.shared.inputs.model_directory import ModelDirectory

PARTS = "parts"
_MOST_THREADS = 8
Item = TypeVar("Item")
Result = TypeVar("Result")


class AnswerJob(StrictModel):
    """The content of job.json: everything that a worker needs."""

    config: AnswerConfig
    hf_dir: Path
    adapter_dir: Path | None = Field(default=None, description="PEFT directory of an unmerged adapter")
    code_sha256: str | None = Field(default=None, description="hash of the model's code that the recipe allows")
    prompt: PromptFormat
    samples_dir: Location
    work_dir: Path
    num_threads: int = Field(default=0, ge=0, description="threads that prepare prompts; 0: by the number of cores")


def part_path(work_dir: Path, number: int) -> Path:
    return work_dir / PARTS / f"{number:05d}.jsonl"


def remove_damaged(work_dir: Path, num_parts: int) -> None:
    """Remove the parts of an earlier run that are not as they were written, so that they are answered again."""
    for path in (part_path(work_dir, number) for number in range(num_parts)):
        if any(read_sealed(file) is None for file in (path, path.with_suffix(".json"))):
            path.unlink(missing_ok=True)


def read_part(path: Path) -> Iterator[tuple[int, Line]]:
    """Return an iterator over (number of the question, line), in the order of the numbers."""
    return ((row.pop("number"), line_of(row)) for row in rows_of(read_sealed(path)))


def answer_parts(
    job: AnswerJob,
    worker: int = 0,
    num_workers: int = 1,
    device: int | None = None,
    on_part: Callable[[int], None] = lambda answered: None,
    on_answer: Callable[[int], None] = lambda answered: None,
    model: ModelDirectory | None = None,
    adapter: AdapterDirectory | None = None,
) -> None:
    """Answer the plan's parts worker, worker + num_workers, ... if their file is missing.

    Args:
        device: number of the GPU on this host.
        on_part: called after each part, with the number of its questions.
        on_answer: called at each answer, with the number of answers in its part before it; its error ends the work.
        model: the open and checked directory of the job's model; None: it is opened and checked here.
        adapter: the same of its adapter.
    """
    questions, config = read_plan(job.work_dir / PLAN_JSONL), job.config
    parts = cut_parts(questions, config.part_size)
    mine = [n for n in range(worker, len(parts), num_workers) if not part_path(job.work_dir, n).is_file()]
    if not mine:
        return
    if model is None:  # in a worker
        model, adapter = open_model_to_answer(job.hf_dir, job.adapter_dir, job.code_sha256)
    settings = EngineSettings(model, job.prompt, config.batch_size, config.batch_tokens, device, adapter)
    engine = make_engine(config.engine, settings)
    groups = {n: groups_of(parts[n], questions, config) for n in mine}
    threads = job.num_threads or min(_MOST_THREADS, os.cpu_count() or 1)
    prepare = functools.partial(_prepare, job, engine, questions)
    with ThreadPoolExecutor(threads, "prepare") as executor:
        coming = ahead(executor, prepare, itertools.chain(*groups.values()), threads + 1)
        try:
            for number in mine:
                start = time.perf_counter()
                lines = _answer(engine, itertools.islice(coming, len(groups[number])), questions, on_answer)
                _write_part(part_path(job.work_dir, number), lines, time.perf_counter() - start)
                on_part(len(parts[number]))
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def groups_of(part: Sequence[int], questions: Sequence[Question], config: AnswerConfig) -> list[list[int]]:
    """Return, for each group of a part, the numbers of its questions."""
    lengths = [questions[number].num_tokens for number in part]
    groups = cut_groups(lengths, config.batch_size, config.batch_tokens)
    return [[part[place] for place in group] for group in groups]


def ahead(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Iterator[Result]:
    """Yield the function's results in the order of the items; up to `count` further calls are already submitted."""
    begun: collections.deque[Future[Result]] = collections.deque()
    for item in items:
        begun.append(executor.submit(function, item))
        if len(begun) > count:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


def _prepare(job: AnswerJob, engine: Engine, questions: Sequence[Question], group: Sequence[int]) -> Prepared:
    """Read the questions of a group from the samples' shards and prepare them for the engine."""
    requests = []
    for number in group:
        question = questions[number]
        shard = local_copy(job.samples_dir / question.shard)
        sample = from_fields(
            question.key,
            read_record(shard, question.offset, question.size, checksum=question.checksum, key=question.key),
        )
        before, images = sample.messages[: question.place], sample.images[: question.num_images]
        requests.append(Request(number, before, images, job.config.max_new_tokens))
    return engine.prepare(requests)


def _answer(
    engine: Engine, groups: Iterable[Prepared], questions: Sequence[Question], on_answer: Callable[[int], None]
) -> list[tuple[int, Line]]:
    lines: list[tuple[int, Line]] = []

    def noted() -> Iterator[Prepared]:
        for group in groups:
            for number, error in group.skipped.items():
                skipped = SkippedSample(key=questions[number].key, skip=error.reason, detail=error.detail)
                lines.append((number, skipped))
            yield group

    for number, answer in engine.answer(noted()):
        line = GeneratedAnswer(
            key=questions[number].key,
            turn=questions[number].turn,
            answer=answer.text,
            stopped=answer.stopped,
            ids=answer.ids,
        )
        on_answer(len(lines))
        lines.append((number, line))
    return sorted(lines, key=lambda item: item[0])


def _write_part(path: Path, lines: Sequence[tuple[int, Line]], seconds: float) -> None:
    answers = [line for _, line in lines if isinstance(line, GeneratedAnswer)]
    tokens = sum(answer.num_tokens for answer in answers)
    cost = {"seconds": seconds, "num_answers": len(answers), "num_tokens": tokens}
    # The costs first, since the part is finished when its lines are there.
    write_sealed(path.with_suffix(".json"), json.dumps(cost))
    rows = (json.dumps({"number": number, **asdict(line)}, ensure_ascii=False) + "\n" for number, line in lines)
    write_sealed(path, "".join(rows))
