"""HF directory + held-out samples -> what the model says.

    answers.jsonl          one line an assistant turn of a held-out sample, in the order of the samples
    speed.json             what it cost; the only file here that two runs do not share, with the reports
    report.json, report.html

    plan.jsonl, parts/     while it is worked on
    job/                   job.json, logs, where other processes answered

Every assistant turn of a held-out sample is answered, after the turns before it with their reference answers. Pixel
limits and system prompt are the directory's; a model before a training gets those of the tokenized samples that it will
be trained on, which its export will have too. Scores are another stage's, so that other metrics never generate again.
One process answers where the cluster's layout has one; otherwise the launcher that starts the trainer starts a worker
for each of its processes. answers.jsonl is the same.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import write_json, write_text
from dataset_builders.contracts.store import absolute
from stages.answer_engine import check_engine
from stages.answer_job import run_workers
from stages.answer_parts import PARTS, AnswerConfig, AnswerJob, answer_parts, part_path, read_part, read_part_time
from stages.answer_plan import PLAN_JSONL, Question, cut_parts, plan_questions, read_plan, write_plan
from stages.answers import ANSWERS_JSONL, GeneratedAnswer, Line, NotAsked, in_order_of_samples, read_answers, to_line
from stages.artifact import Artifact, Input, Stage, StageOutput
from stages.cluster_config import ClusterConfig
from stages.encode_chat import ChatEncoder
from stages.hf_directory import check_hf_dir
from stages.prompt_format import PromptFormat, read_prompt_format
from stages.report import Histogram, Section, Table, write_report
from stages.train import hf_dir_of

VERSION = 1
SPEED_JSON = "speed.json"
_LEFT_OUT_ROWS = 200
__all__ = ["STAGE", "AnswerConfig", "AnswerResources", "answer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerResources:
    """Execution: where it is generated, and who hears of it.

    Attributes:
        cluster: one worker for each of its processes, one a GPU.
        num_threads: that prepare prompts, of each worker; 0: by the cores of the machine.
        on_progress: called as (done, total) in answers after each part; done never goes back.
        on_line: hears of every line of the workers' log.
    """

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    num_threads: int = 0
    on_progress: Callable[[int, int], None] | None = None
    on_line: Callable[[str], None] = lambda line: None

    def report(self, done: int, total: int) -> None:
        if self.on_progress is not None:
            self.on_progress(done, total)


def answer(
    config: AnswerConfig, inputs: Mapping[str, Input], work: Path, resources: AnswerResources | None
) -> StageOutput:
    """Inputs: "hf" (an export, or an HF directory of the user's), "samples"; "tokenized" may be left out: it is asked
    as the export of a training on that would be."""
    if not (work / ANSWERS_JSONL).is_file():
        _make(config, inputs, work, resources or AnswerResources())
    for made_of in (work / PLAN_JSONL, work / PARTS):
        shutil.rmtree(made_of) if made_of.is_dir() else made_of.unlink(missing_ok=True)
    lines = list(read_answers(work / ANSWERS_JSONL))
    speed = _speed(work / SPEED_JSON)
    skips = Counter(line.skip for line in lines if isinstance(line, NotAsked))
    stats = {"counts": _counts(lines), "speed": speed}
    _write_report(work, lines, speed, skips)
    return StageOutput(skips=dict(sorted(skips.items())), stats=stats)


def _make(config: AnswerConfig, inputs: Mapping[str, Input], work: Path, resources: AnswerResources) -> None:
    """answers.jsonl, and what it cost."""
    if resources.cluster.launcher == "torchrun":  # elsewhere a worker says it
        check_engine(config.engine)
    hf_dir, samples = hf_dir_of(inputs["hf"]), inputs["samples"]
    check_hf_dir(hf_dir)
    job = AnswerJob(
        config=config,
        hf_dir=hf_dir.resolve(),
        prompt=_prompt_format(hf_dir, inputs.get("tokenized")),
        samples_dir=absolute(samples.dir),
        work_dir=work.resolve(),
        num_threads=resources.num_threads,
    )
    questions = _plan(job, samples)
    _generate(job, questions, resources)
    _gather(job, questions, work)


def _prompt_format(hf_dir: Path, tokenized: Input | None) -> PromptFormat:
    assert tokenized is None or isinstance(tokenized, Artifact)
    return read_prompt_format(hf_dir, None if tokenized is None else tokenized.manifest.stats)


def _plan(job: AnswerJob, samples: Artifact) -> list[Question]:
    """The questions, as an earlier try planned them or anew.

    Raises:
        InputError: there are none, or none that can be asked.
    """
    path = job.work_dir / PLAN_JSONL
    if not path.is_file():
        chat = ChatEncoder(job.hf_dir, system_prompt=job.prompt.system_prompt)
        write_plan(path, list(plan_questions(samples, chat, job.prompt.pixels, job.config.max_samples_per_subset)))
    questions = read_plan(path)
    if not questions:
        raise InputError(f"{samples.dir} has no held-out samples to evaluate on; raise convert.heldout_fraction")
    return questions


def _generate(job: AnswerJob, questions: Sequence[Question], resources: AnswerResources) -> None:
    """Every part that is not there."""
    parts = cut_parts(questions, job.config.part_size)
    (job.work_dir / PARTS).mkdir(exist_ok=True)

    def look(_: object = None) -> None:
        done = sum(len(part) for n, part in enumerate(parts) if part_path(job.work_dir, n).is_file())
        resources.report(len(questions) - sum(map(len, parts)) + done, len(questions))

    if all(part_path(job.work_dir, n).is_file() for n in range(len(parts))):
        return look()
    if answers_apart(resources.cluster):
        return run_workers(job, resources.cluster, resources.on_line, look)
    return answer_parts(job, on_part=look)


def answers_apart(cluster: ClusterConfig) -> bool:
    """Whether other processes answer, which the cluster's launcher starts; else this one does."""
    return cluster.launcher != "torchrun" or cluster.processes > 1


def _gather(job: AnswerJob, questions: Sequence[Question], work: Path) -> None:
    """The parts -> answers.jsonl, and what they cost.

    Raises:
        InputError: nothing could be asked.
    """
    paths = [part_path(work, n) for n in range(len(cut_parts(questions, job.config.part_size)))]
    unasked = [(n, NotAsked(key=q.key, skip=q.skip, detail=q.detail)) for n, q in enumerate(questions) if q.skip]
    lines = in_order_of_samples([*unasked, *(line for path in paths for line in read_part(path))])
    if not any(isinstance(line, GeneratedAnswer) for line in lines):
        reasons = dict(Counter(line.skip for line in lines))
        raise InputError(f"{job.samples_dir}: none of {len(lines)} held-out samples can be asked ({reasons})")
    times = [asdict(read_part_time(path)) for path in paths]
    write_json(work / SPEED_JSON, {name: sum(part[name] for part in times) for name in times[0]})
    write_text(work / ANSWERS_JSONL, "".join(map(to_line, lines)))


def _speed(path: Path) -> dict[str, float]:
    """Answers and tokens a second of one worker, pictures and prompts included; the loading of the model is not."""
    cost = json.loads(path.read_text(encoding="utf-8"))
    seconds = max(cost["seconds"], 1e-9)
    return {
        "answers_per_second": round(cost["num_answers"] / seconds, 2),
        "tokens_per_second": round(cost["num_tokens"] / seconds, 2),
    }


def _counts(lines: Sequence[Line]) -> dict[str, int]:
    answers = [line for line in lines if isinstance(line, GeneratedAnswer)]
    return {
        "samples": len({line.key for line in answers}),
        "answers": len(answers),
        "tokens": sum(line.num_tokens for line in answers),
    }


def _write_report(work: Path, lines: Sequence[Line], speed: Mapping[str, float], skips: Mapping[str, int]) -> None:
    """report.json and report.html: how much was said, how fast, and which samples could not be asked."""
    answers = [line for line in lines if isinstance(line, GeneratedAnswer)]
    left_out = [line for line in lines if isinstance(line, NotAsked)]
    summary: dict[str, Any] = {**_counts(lines), "stopped": sum(line.stopped for line in answers)}
    summary |= {f"{name.replace('_', ' ')} of a worker": value for name, value in speed.items()}
    if skips:
        summary["left out"] = dict(sorted(skips.items()))
    sections: list[Section] = [Histogram("Length of the answers", [line.num_tokens for line in answers], "tokens")]
    if left_out:
        rows = [[line.key, line.skip, line.detail] for line in left_out[:_LEFT_OUT_ROWS]]
        title = f"Samples that could not be asked, the first {len(rows)} of {len(left_out)}"
        sections.append(Table(title, ["key", "reason", "detail"], rows))
    write_report(work, title="Answers", summary=summary, sections=sections)


STAGE = Stage("answer", VERSION, answer, on_disk=True)
