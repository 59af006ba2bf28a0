"""answer: an HF directory and held-out samples -> the model's answers.

    answers.jsonl          one line per assistant turn of a held-out sample, in the order of the samples
    speed.json             time, answers and tokens; only this file and the reports differ between two runs
    report.json, report.html

    plan.jsonl, parts/     while the stage runs
    job/                   job.json and logs, if worker processes answer

Every assistant turn of a held-out sample is answered; the turns before it have their reference answers. Pixel limits
and system prompt come from the model directory. For a model before training, they come from the tokenized samples that
it will be trained on, because its export will have them too. Scoring is another stage, so that a change of metrics does
not generate again. If the cluster's layout has one process, this process answers; otherwise the trainer's launcher
starts one worker per process. answers.jsonl is the same in both cases.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataset_builders.errors import InputError
from dataset_builders.storage.files import read_sealed, write_json, write_text
from dataset_builders.storage.store import absolute
from stages.answer.config import AnswerConfig
from stages.answer.engine import check_engine
from stages.answer.heldout import (
    ANSWERS_JSONL,
    GeneratedAnswer,
    Line,
    SkippedSample,
    in_order_of_samples,
    read_answers,
    to_line,
)
from stages.answer.parts import (
    PARTS,
    PLAN_JSONL,
    AnswerJob,
    Question,
    answer_parts,
    cut_parts,
    part_path,
    plan_questions,
    read_part,
    read_plan,
    remove_damaged,
    write_plan,
)
from stages.answer.worker import run_workers
from stages.shared.artifacts.artifact import Artifact, Input, Stage, StageOutput
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.prompt import PromptFormat, read_prompt_format
from stages.shared.inputs.adapter_directory import AdapterDirectory, opened_adapter
from stages.shared.inputs.model_directory import ModelDirectory, opened_model
from stages.shared.launchers.config import ClusterConfig
from stages.shared.pages.report import Histogram, Section, Table, write_report

# 2: answers.jsonl has the token ids in place of their number; 3: an answer ends with its turn, and
# max_samples_per_subset draws samples; 4: the form of the prompts is in the manifest
VERSION = 4
SPEED_JSON = "speed.json"
_LEFT_OUT_ROWS = 200


def answer(
    config: AnswerConfig, inputs: Mapping[str, Input], work: Path, resources: StageResources | None
) -> StageOutput:
    """Run the stage. Inputs: "hf" (an export, or the user's HF directory), "samples", and optionally "adapter" (an
    export, or the user's PEFT directory) and "tokenized". With "tokenized", the model gets the prompts that the export
    of a training on these samples would get."""
    tokenized = inputs.get("tokenized")
    assert tokenized is None or isinstance(tokenized, Artifact)
    prompt = read_prompt_format(opened_model(inputs["hf"]), None if tokenized is None else tokenized.manifest.stats)
    if not (work / ANSWERS_JSONL).is_file():  # else the work of an earlier run was whole, and only its end is repeated
        _answer_all(config, inputs, prompt, work, resources or StageResources())
    shutil.rmtree(work / PARTS, ignore_errors=True)
    (work / PLAN_JSONL).unlink(missing_ok=True)
    lines = list(read_answers(work / ANSWERS_JSONL))
    answers = [line for line in lines if isinstance(line, GeneratedAnswer)]
    left_out = [line for line in lines if isinstance(line, SkippedSample)]
    skips = dict(sorted(Counter(line.skip for line in left_out).items()))
    counts = {
        "samples": len({line.key for line in answers}),
        "answers": len(answers),
        "tokens": sum(line.num_tokens for line in answers),
    }
    _write_report(work, answers, left_out, counts, skips)
    return StageOutput(skips=skips, stats={"counts": counts, "prompt": prompt.model_dump(mode="json")})


def _answer_all(
    config: AnswerConfig, inputs: Mapping[str, Input], prompt: PromptFormat, work: Path, resources: StageResources
) -> None:
    """Plan the questions, or read an earlier run's plan; answer the missing parts, and gather all of them."""
    adapter = opened_adapter(inputs["adapter"]) if "adapter" in inputs else None
    if resources.cluster.is_here:  # elsewhere the workers check it
        check_engine(config.engine, adapter)
    model, samples = opened_model(inputs["hf"]), inputs["samples"]
    model.check_weights()
    if adapter is not None:
        adapter.check_base(model)
    job = AnswerJob(
        config=config,
        hf_dir=model.path.resolve(),
        adapter_dir=None if adapter is None else adapter.path.resolve(),
        code_sha256=model.code_sha256,
        prompt=prompt,
        samples_dir=absolute(samples.dir),
        work_dir=work.resolve(),
        num_threads=resources.cluster.num_threads,
    )
    questions = read_plan(job.work_dir / PLAN_JSONL)
    if questions is None:
        chat = ChatEncoder(model, system_prompt=prompt.system_prompt)
        questions = list(plan_questions(samples, chat, prompt, config.max_samples_per_subset))
        write_plan(job.work_dir / PLAN_JSONL, questions)
    if config.engine == "vllm" and (asked := next((q for q in questions if q.num_videos), None)):
        raise InputError(
            f"{asked.key} has a video, and engine=vllm is asked about images and texts alone; use engine=transformers"
        )
    if not questions:
        raise InputError(f"{samples.dir} has no held-out samples to evaluate on; raise convert.heldout_fraction")
    _answer_missing_parts(job, questions, resources, model, adapter)
    _gather(job, questions, work)


def _answer_missing_parts(
    job: AnswerJob,
    questions: Sequence[Question],
    resources: StageResources,
    model: ModelDirectory,
    adapter: AdapterDirectory | None,
) -> None:
    """Answer every missing part, in this process or in worker processes."""
    parts = cut_parts(questions, job.config.part_size)
    (job.work_dir / PARTS).mkdir(exist_ok=True)
    remove_damaged(job.work_dir, len(parts))

    def look(answered: int = 0) -> None:
        missing = sum(len(part) for n, part in enumerate(parts) if not part_path(job.work_dir, n).is_file())
        resources.report(len(questions) - missing + answered, len(questions))

    if all(part_path(job.work_dir, n).is_file() for n in range(len(parts))):
        return look()
    if answers_apart(resources.cluster):
        return run_workers(job, resources.cluster, resources.on_line, look)
    return answer_parts(job, on_part=lambda _: look(), on_answer=look, model=model, adapter=adapter)


def answers_apart(cluster: ClusterConfig) -> bool:
    """Whether the cluster's launcher starts worker processes; otherwise this process answers."""
    return not cluster.is_here or cluster.processes > 1


def _gather(job: AnswerJob, questions: Sequence[Question], work: Path) -> None:
    """Write answers.jsonl and speed.json from the parts."""
    paths = [part_path(work, n) for n in range(len(cut_parts(questions, job.config.part_size)))]
    unasked = [(n, SkippedSample(key=q.key, skip=q.skip, detail=q.detail)) for n, q in enumerate(questions) if q.skip]
    lines: list[Line] = in_order_of_samples([*unasked, *(line for path in paths for line in read_part(path))])
    if not any(isinstance(line, GeneratedAnswer) for line in lines):
        reasons = dict(Counter(line.skip for line in lines))
        raise InputError(f"{job.samples_dir}: none of {len(lines)} held-out samples can be asked ({reasons})")
    costs = [json.loads(read_sealed(path.with_suffix(".json"))) for path in paths]
    # answers.jsonl last: `answer` takes its presence for the end of the work.
    write_json(work / SPEED_JSON, {name: sum(cost[name] for cost in costs) for name in costs[0]})
    write_text(work / ANSWERS_JSONL, "".join(map(to_line, lines)))


def _write_report(
    work: Path,
    answers: Sequence[GeneratedAnswer],
    left_out: Sequence[SkippedSample],
    counts: Mapping[str, int],
    skips: Mapping[str, int],
) -> None:
    """Write report.json: number and length of the answers, speed, and samples that were not asked."""
    cost = json.loads((work / SPEED_JSON).read_text(encoding="utf-8"))
    seconds = max(cost["seconds"], 1e-9)  # of all workers together, with the reading of images, without loading a model
    summary: dict[str, Any] = {
        **counts,
        "stopped": sum(line.stopped for line in answers),
        "answers per second of a worker": round(cost["num_answers"] / seconds, 2),
        "tokens per second of a worker": round(cost["num_tokens"] / seconds, 2),
    }
    if skips:
        summary["left out"] = skips
    sections: list[Section] = [Histogram("Length of the answers", [line.num_tokens for line in answers], "tokens")]
    if left_out:
        rows = [[line.key, line.skip, line.detail] for line in left_out[:_LEFT_OUT_ROWS]]
        title = f"Samples that could not be asked, the first {len(rows)} of {len(left_out)}"
        sections.append(Table(title, ["key", "reason", "detail"], rows))
    write_report(work, title="Answers", summary=summary, sections=sections)


STAGE = Stage("answer", VERSION, answer, on_disk=True, digested=(ANSWERS_JSONL,))
