"""The questions in parts: planned before the model is loaded, and answered by the stage's own process or by workers.

    plan.jsonl          one line per question, in the order of the samples, with the number of tokens of its prompt
    parts/00003.jsonl   {"number": 17, "key": ..., "turn": ...}: one part's lines, sorted by the question's number
    parts/00003.json    the part's seconds (in the process that answered it), answers and tokens; not in the result

All questions are sorted by length, the longest first, and cut into parts. A worker takes whole parts. A part is cut
into groups; the model reads the prompts of a group in one call. Parts and groups depend only on the lengths and the
config, not on the number of workers or on an earlier run. A part's file is written atomically when the whole part is
answered, and a rerun keeps it. While the model answers, threads read, decode and encode the next questions.
"""

import collections
import functools
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

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, SkipSample, from_fields
from dataset_builders.contracts.shard_io import read_record
from dataset_builders.contracts.strict import StrictModel
from dataset_builders.pictures.images import image_size
from dataset_builders.pictures.pixels import image_grid
from dataset_builders.storage.files import read_sealed, write_sealed
from dataset_builders.storage.store import Location, local_copy
from stages.answer.config import AnswerConfig
from stages.answer.engine import Engine, EngineSettings, Prepared, Request, make_engine
from stages.answer.heldout import GeneratedAnswer, Line, SkippedSample, heldout_records, iter_rows, line_of
from stages.shared.artifacts.artifact import Artifact
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.images import plans_of
from stages.shared.chat_format.prompt import PromptFormat
from stages.shared.chat_format.text import slots_of
from stages.shared.inputs.adapter_directory import AdapterDirectory, open_model_to_answer
from stages.shared.inputs.model_directory import ModelDirectory

PLAN_JSONL = "plan.jsonl"
PARTS = "parts"
_GROUPS_SIDE_BY_SIDE = 4  # groups that fill a decoding batch; a new group enters as old rows end
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


@dataclass(frozen=True, slots=True)
class Question:
    """An assistant turn to be answered."""

    key: str
    turn: int  # number of the assistant turn in its sample, from 0
    place: int  # index of the answer among the messages; the messages before it are the prompt
    num_images: int  # in the prompt, which has the sample's first ones
    num_videos: int  # the same of videos
    num_tokens: int  # in the prompt, including those of images and videos; 0 if it cannot be asked
    shard: str  # shard, offset, size and checksum (xxh3_64) are the place of the sample's record
    offset: int
    size: int
    checksum: int
    skip: str = ""  # why it cannot be asked, judged by its text and its images' headers; empty if it can be asked
    detail: str = ""


def plan_questions(
    samples: Artifact, chat: ChatEncoder, prompt: PromptFormat, max_per_subset: int | None
) -> Iterator[Question]:
    """Yield every assistant turn of the held-out samples, in their order; no image and no video is decoded."""
    for sample, shard, record in heldout_records(samples, prompt, max_per_subset):
        answers = [place for place, message in enumerate(sample.messages) if message.role == "assistant"]
        for turn, place in enumerate(answers):
            before = sample.messages[:place]
            slots = slots_of(before)
            shown, clips = slots.count(IMAGE_SLOT), slots.count(VIDEO_SLOT)
            length, skip, detail = 0, "", ""
            try:
                # EXIF may swap an image's sides, but the number of its tokens does not change.
                grids = [image_grid(*image_size(image), prompt.pixels) for image in sample.images[:shown]]
                plans = plans_of(sample.videos[:clips], prompt.videos, chat.model)
                length = len(chat.encode_prompt(before, grids, plans))
            except SkipSample as error:
                skip, detail = error.reason, error.detail
            yield Question(
                *(sample.key, turn, place, shown, clips, length),
                *(shard, record.offset, record.size, record.checksum),
                *(skip, detail),
            )


def write_plan(path: Path, questions: Sequence[Question]) -> None:
    write_sealed(path, "".join(json.dumps(asdict(question), ensure_ascii=False) + "\n" for question in questions))


def read_plan(path: Path) -> list[Question] | None:
    """Return the questions in a plan's file; None if there is no whole plan."""
    text = read_sealed(path)
    return None if text is None else [Question(**row) for row in iter_rows(text)]


def cut_parts(questions: Sequence[Question], part_size: int) -> list[list[int]]:
    """Return the question numbers of each part: all that can be asked, the longest first, `part_size` per part."""
    numbers = [number for number, question in enumerate(questions) if not question.skip]
    numbers.sort(key=lambda number: (-questions[number].num_tokens, number))
    return [numbers[start : start + part_size] for start in range(0, len(numbers), part_size)]


def cut_groups(lengths: Sequence[int], batch_size: int, batch_tokens: int) -> list[list[int]]:
    """Return the indices of the prompts in each group.

    Args:
        lengths: number of tokens of each prompt, the longest first.
        batch_size, batch_tokens: the limits of a decoding batch; a group, including padding, has at most a quarter of
            each (a single prompt may be longer).
    """
    rows, tokens = max(1, batch_size // _GROUPS_SIDE_BY_SIDE), batch_tokens // _GROUPS_SIDE_BY_SIDE
    groups: list[list[int]] = []
    for place in range(len(lengths)):
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or len(groups[-1]) == rows or (len(groups[-1]) + 1) * longest > tokens:
            groups.append([])
        groups[-1].append(place)
    return groups


def part_path(work_dir: Path, number: int) -> Path:
    return work_dir / PARTS / f"{number:05d}.jsonl"


def remove_damaged(work_dir: Path, num_parts: int) -> None:
    """Remove the parts of an earlier run that are not as they were written, so that they are answered again."""
    for path in (part_path(work_dir, number) for number in range(num_parts)):
        if any(read_sealed(file) is None for file in (path, path.with_suffix(".json"))):
            path.unlink(missing_ok=True)


def read_part(path: Path) -> Iterator[tuple[int, Line]]:
    """Return an iterator over (number of the question, line), in the order of the numbers."""
    return ((row.pop("number"), line_of(row)) for row in iter_rows(read_sealed(path)))


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
    longest = max(questions[place].num_tokens for number in mine for place in parts[number]) + config.max_new_tokens
    settings = EngineSettings(model, job.prompt, config.batch_size, config.batch_tokens, device, adapter, longest)
    engine = make_engine(config.engine, settings)
    groups: dict[int, list[list[int]]] = {}  # number of a part -> the question numbers of each group
    for number in mine:
        lengths = [questions[place].num_tokens for place in parts[number]]
        cut = cut_groups(lengths, config.batch_size, config.batch_tokens)
        groups[number] = [[parts[number][place] for place in group] for group in cut]
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


def ahead(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Iterator[Result]:
    """Yield the function's results in the order of the items; up to `count` further calls are already submitted."""
    # Not executor.map, which submits all items at once: their pixels would fill the memory.
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
        fields = read_record(shard, question.offset, question.size, checksum=question.checksum, key=question.key)
        sample = job.prompt.with_boxes(from_fields(question.key, fields))
        before, images = sample.messages[: question.place], sample.images[: question.num_images]
        videos = sample.videos[: question.num_videos]
        requests.append(Request(number, before, images, job.config.max_new_tokens, videos))
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
