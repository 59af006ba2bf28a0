"""The parts of a plan, answered: what a worker does, in the stage's own process or in one of many.

    parts/00003.jsonl   {"number": 17, "key": ..., "turn": ...}: one part's lines, by the number of the question
    parts/00003.json    seconds, answers and tokens of it; no part of the result

A part's file appears whole, when all of the part is answered, and a rerun keeps it. While the model answers, threads
read, decode and encode what comes next.
"""

import collections
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import Field

from dataset_builders.contracts.files import write_json, write_text
from dataset_builders.contracts.sample_record import from_fields
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.store import Location, local_copy
from dataset_builders.contracts.strict import StrictModel
from stages.answer_engine import Asked, Engine, EngineName, EngineSettings, Prepared, make_engine
from stages.answer_plan import PLAN_JSONL, Question, cut_groups, cut_parts, read_plan
from stages.answers import GeneratedAnswer, Line, NotAsked, iter_jsonl
from stages.prompt_format import PromptFormat

PARTS = "parts"
_MOST_THREADS = 8
Item = TypeVar("Item")
Result = TypeVar("Result")


class AnswerConfig(StrictModel):
    """Identity: what is asked of the model, and together with what: in bfloat16 the batch decides the last bits."""

    max_new_tokens: int = Field(gt=0, le=32768, description="an answer is cut there and counts as not stopped")
    max_samples_per_subset: int | None = Field(
        default=None, gt=0, description="held-out samples of a subset that are used, the first ones; none: all of them"
    )
    engine: EngineName = Field(default="transformers", description="library that generates; vllm must be installed")
    batch_size: int = Field(default=128, gt=0, description="answers generated side by side, at most")
    batch_tokens: int = Field(
        default=131072, gt=0, description="tokens of prompts and answers side by side, padding included, at most"
    )
    part_size: int = Field(
        default=256, gt=0, description="answers that are written together: a killed run loses one part at most"
    )


class AnswerJob(StrictModel):
    """What a worker is told."""

    config: AnswerConfig
    hf_dir: Path
    prompt: PromptFormat
    samples_dir: Location
    work_dir: Path
    num_threads: int = Field(default=0, ge=0, description="that prepare prompts; 0: by the cores of the machine")


@dataclass(frozen=True, slots=True)
class PartTime:
    """What a part cost: the seconds of the process that answered it."""

    seconds: float
    num_answers: int
    num_tokens: int


def part_path(work_dir: Path, number: int) -> Path:
    """The lines of a part."""
    return work_dir / PARTS / f"{number:05d}.jsonl"


def read_part(path: Path) -> Iterator[tuple[int, Line]]:
    """(number of the question, line), in the order of the numbers."""
    for row in iter_jsonl(path):
        number = row.pop("number")
        yield number, NotAsked(**row) if "skip" in row else GeneratedAnswer(**row)


def read_part_time(path: Path) -> PartTime:
    """What the part of these lines cost."""
    return PartTime(**json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))


def answer_parts(
    job: AnswerJob,
    worker: int = 0,
    num_workers: int = 1,
    device: int | None = None,
    on_part: Callable[[int], None] = lambda answered: None,
) -> None:
    """Answer parts worker, worker + num_workers, ... of the plan, those whose file is not there.

    Args:
        device: place of the GPU on this host.
        on_part: called with the number of questions of each part that was answered now.

    Raises:
        InputError: the model cannot be loaded.
    """
    questions, config = read_plan(job.work_dir / PLAN_JSONL), job.config
    parts = cut_parts(questions, config.part_size)
    mine = [n for n in range(worker, len(parts), num_workers) if not part_path(job.work_dir, n).is_file()]
    if not mine:
        return
    settings = EngineSettings(job.hf_dir, job.prompt, config.batch_size, config.batch_tokens, device)
    engine = make_engine(config.engine, settings)
    groups = {n: groups_of(parts[n], questions, config) for n in mine}
    threads = job.num_threads or min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, "prepare") as executor:
        coming = ahead(executor, _Preparing(job, engine, questions), itertools.chain(*groups.values()), threads + 1)
        try:
            for number in mine:
                start = time.perf_counter()
                lines = _answer(engine, itertools.islice(coming, len(groups[number])), questions)
                _write_part(part_path(job.work_dir, number), lines, time.perf_counter() - start)
                on_part(len(parts[number]))
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def groups_of(part: Sequence[int], questions: Sequence[Question], config: AnswerConfig) -> list[list[int]]:
    """Numbers of the questions of each group of a part."""
    lengths = [questions[number].num_tokens for number in part]
    groups = cut_groups(lengths, config.batch_size, config.batch_tokens)
    return [[part[place] for place in group] for group in groups]


def ahead(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Iterator[Result]:
    """The function's results in the order of the items, `count` of them begun before they are asked for."""
    begun: collections.deque[Future[Result]] = collections.deque()
    for item in items:
        begun.append(executor.submit(function, item))
        if len(begun) > count:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


@dataclass(frozen=True, slots=True)
class _Preparing:
    """Numbers of a group's questions -> the group, ready for the engine."""

    job: AnswerJob
    engine: Engine
    questions: Sequence[Question]

    def __call__(self, group: Sequence[int]) -> Prepared:
        return self.engine.prepare([self._asked(number) for number in group])

    def _asked(self, number: int) -> Asked:
        question = self.questions[number]
        shard = local_copy(self.job.samples_dir / question.shard)
        sample = from_fields(question.key, read_record(shard, question.offset, question.size))
        before, images = sample.messages[: question.place], sample.images[: question.num_images]
        return Asked(number, before, images, self.job.config.max_new_tokens)


def _answer(engine: Engine, groups: Iterable[Prepared], questions: Sequence[Question]) -> list[tuple[int, Line]]:
    lines: list[tuple[int, Line]] = []

    def noted() -> Iterator[Prepared]:
        for group in groups:
            lines.extend((n, NotAsked.of(questions[n].key, error)) for n, error in group.skipped.items())
            yield group

    for number, said in engine.answer(noted()):
        question = questions[number]
        line = GeneratedAnswer(
            key=question.key, turn=question.turn, answer=said.text, stopped=said.stopped, num_tokens=said.num_tokens
        )
        lines.append((number, line))
    return sorted(lines, key=lambda item: item[0])


def _write_part(path: Path, lines: Sequence[tuple[int, Line]], seconds: float) -> None:
    answers = [line for _, line in lines if isinstance(line, GeneratedAnswer)]
    cost = PartTime(seconds, len(answers), sum(answer.num_tokens for answer in answers))
    write_json(path.with_suffix(".json"), asdict(cost))
    rows = (json.dumps({"number": number, **asdict(line)}, ensure_ascii=False) + "\n" for number, line in lines)
    write_text(path, "".join(rows))
