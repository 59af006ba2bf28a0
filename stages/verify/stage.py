"""An export is loaded as somebody else would load it, and answers a drawn sample of the held-out questions.

    report.json, report.html    per loader: answers that are the same, explained by rounding or resizing, or different
    questions/questions.json    what `loaders.py` reads, while the stage runs
    questions/00000-0.png       the first picture of question 0, decoded, upright, on white
    questions/00000.npy         (P, 3 * patch_size^2) uint8: our patches of all pictures of question 0
    job/                        job.json and the log, while the stage runs

The loaders run in a process of their own, which imports nothing of athanor: transformers on the directory alone, PEFT
with the adapter on its base, MLflow's pyfunc, and vLLM, if this Python or ATHANOR_VLLM_PYTHON has it, on the directory
and with the adapter on its base. Their answers are compared with those of `answer`, token by token. Headers and small
files are compared with the model that the training started from, since greedy answers do not show a lost draft layer or
another dtype, and with what vLLM needs of a directory.

Of questions about videos, only the prompts are compared: token by token with those of transformers' processors, which
read their settings from the directory.

`same_answers` of the manifest's stats is the share of the answers that each loader gives alike, of the worst loader;
0 if a loader fails, or if the directory differs. `execution.registry.gates.same_answers` holds it against a bound.
"""

import hashlib
import io
import json
import shutil
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from dataset_builders.contracts.sample import IMAGE_SLOT, VIDEO_SLOT, Sample
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import open_rgb
from dataset_builders.pictures.pixels import encode_image
from dataset_builders.storage.files import write_json
from stages.answer.heldout import ANSWERS_JSONL, GeneratedAnswer, heldout_samples, read_answers
from stages.release.directory import write_directory
from stages.release.flavor import FLAVOR_FILES
from stages.shared.artifacts.artifact import Artifact, Input, Stage, StageOutput
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.images import plans_of
from stages.shared.chat_format.prompt import PromptFormat, read_prompt_format
from stages.shared.chat_format.text import slots_of
from stages.shared.chat_format.video_reference import VideoReference
from stages.shared.inputs.adapter_directory import AdapterDirectory
from stages.shared.inputs.model_directory import ModelDirectory, end_ids, opened_model
from stages.shared.inputs.served import lora_options, missing_keys, unservable, unservable_adapter
from stages.shared.launchers.job import Job, make_launcher, run_job
from stages.shared.launchers.vllm import find_vllm
from stages.shared.pages.report import Section, Table, write_report
from stages.shared.scoring.names import SAME_ANSWERS
from stages.verify.config import VerifyConfig
from stages.verify.directory import differences
from stages.verify.verdict import counted, first_of, judge, share
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT

# 2: bytes of copied tensors; 3: what vLLM needs of a directory, and the adapter in vLLM; 4: prompts with videos
VERSION = 4
JOB_DIR, ROWS = "job", "loaders.json"
VLLM, VLLM_ADAPTER = "vllm", "vllm adapter"
SERVERS = (VLLM, VLLM_ADAPTER)  # checked only where vLLM is installed and loads the directory
QUESTIONS = "questions"
END = -1  # stands for any token that ends an answer
_SPARE = 4  # drawn per question, since not every sample is a single question


def verify(
    config: VerifyConfig, inputs: Mapping[str, Input], work: Path, resources: StageResources | None
) -> StageOutput:
    """Run the stage. Inputs: "export", "answers" (of the export), "samples", and "model" (the HF directory that the
    training started from)."""
    exported, source = inputs["export"], opened_model(inputs["model"])
    facts = exported.manifest.stats
    copied = () if "mtp" in facts else facts.get("carried", ())  # a trained draft layer has the prefix of a copied one
    write_directory(work, exported, inputs["samples"], None, config.max_new_tokens)
    hf_dir = work / HF_EXPORT
    answers = [
        line for line in read_answers(inputs["answers"].dir / ANSWERS_JSONL) if isinstance(line, GeneratedAnswer)
    ]
    faults, questions, loaders, results = differences(hf_dir, source, copied), [], {}, {}
    for_vllm: list[str] = []  # tells, and is no fault: who serves by other programs does not need it
    try:
        model = ModelDirectory(hf_dir)
        prompt = read_prompt_format(model)
        chat = ChatEncoder(model, system_prompt=prompt.system_prompt)
    except InputError as error:
        faults.append(str(error))
    else:
        for_vllm = unservable(model)
        faults += video_faults(model, inputs["samples"], answers, chat, prompt)
        questions = write_questions(work, config, inputs["samples"], answers, chat, prompt)
        if questions:
            results = _ask(work, source, exported, model, prompt, questions, resources or StageResources())
        loaders = _judged(results, questions, source.shape.language.num_layers, chat)
    write_json(work / ROWS, {name: {**about, "rows": results[name]["rows"]} for name, about in loaders.items()})
    for name in (HF_EXPORT, QUESTIONS, JOB_DIR):
        shutil.rmtree(work / name, ignore_errors=True)
    for name in FLAVOR_FILES:
        (work / name).unlink()
    shares = [each[SAME_ANSWERS] for each in loaders.values() if each[SAME_ANSWERS] is not None]
    share_of_worst = 0.0 if faults else min(shares, default=None)
    stats = {"questions": len(questions), "faults": faults, "vllm": for_vllm, "loaders": loaders}
    stats[SAME_ANSWERS] = share_of_worst
    firsts = (loader["first"] for loader in loaders.values() if loader[SAME_ANSWERS] is not None)
    # Why not all answers are the same, in words; "" if they are.
    stats |= {"reason": next(filter(None, [*faults, *firsts]), ""), "rows": _loader_rows(loaders)}
    _write_report(work, stats)
    return StageOutput(stats=stats)


def write_questions(
    work: Path,
    config: VerifyConfig,
    samples: Artifact,
    answers: Sequence[GeneratedAnswer],
    chat: ChatEncoder,
    prompt: PromptFormat,
) -> list[dict[str, Any]]:
    """Write the drawn questions as another program gets them, messages and PNG files, with our own answers; return
    them. `chat` is the encoder of the export; its prompts are the expected ones."""
    drawn = {answer.key: answer for answer in draw(answers, _SPARE * config.num_questions)}
    samples_of = {sample.key: sample for sample in heldout_samples(samples, prompt) if sample.key in drawn}
    usable = [sample for sample in map(samples_of.get, drawn) if _begins_with_one_question(sample)]
    usable = [sample for sample in usable if VIDEO_SLOT not in slots_of(sample.messages[:2])][: config.num_questions]
    directory = work / QUESTIONS
    directory.mkdir(exist_ok=True)
    questions = [
        _write_question(directory, number, each, drawn[each.key], config.max_new_tokens, chat, prompt)
        for number, each in enumerate(usable)
    ]
    about = {"questions": questions, "end": END}
    write_json(
        directory / "questions.json", about | {"patch_format": prompt.pixels.patch_format.model_dump(mode="json")}
    )
    return questions


def video_faults(
    model: ModelDirectory,
    samples: Artifact,
    answers: Sequence[GeneratedAnswer],
    chat: ChatEncoder,
    prompt: PromptFormat,
) -> list[str]:
    """Return one line if the prompt of a drawn held-out question about videos is not the one that transformers makes
    with the directory's files; [] if it is, or if there is no such question."""
    if prompt.videos is None:
        return []
    keys = {answer.key for answer in answers if answer.turn == 0}
    for sample in heldout_samples(samples, prompt):
        before = sample.messages[: 1 + (sample.messages[0].role == "system")]
        slots = slots_of(before)
        if sample.key not in keys or not _begins_with_one_question(sample) or {*slots} != {VIDEO_SLOT}:
            continue
        videos = sample.videos[: len(slots)]
        plans = plans_of(videos, prompt.videos, model)
        ours = chat.encode_prompt(before, np.zeros((0, 3)), plans).tolist()
        reference = VideoReference(model)
        reads = [reference.read(video, plan) for video, plan in zip(videos, plans)]
        text = reference.expanded(chat.render_one(before, add_generation_prompt=True), [read.text for read in reads])
        theirs = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
        if ours == theirs and [read.indices for read in reads] == [[*plan.indices] for plan in plans]:
            return []
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        found = [chat.decode(np.array(ids[place : place + 8])) for ids in (ours, theirs)]
        return [
            f"{sample.key}: its prompt about a video has {found[0]!r} at token {place}, and transformers "
            f"{version('transformers')} writes {found[1]!r} with video_preprocessor_config.json of the directory"
        ]
    return []


def draw(answers: Iterable[GeneratedAnswer], count: int) -> list[GeneratedAnswer]:
    """Return `count` first answers of samples, from each subset in turn, in an order fixed by their keys."""
    subsets: dict[str, list[GeneratedAnswer]] = defaultdict(list)
    for answer in sorted((a for a in answers if a.turn == 0), key=lambda a: hashlib.sha256(a.key.encode()).digest()):
        subsets[answer.key.rpartition("/")[0]].append(answer)
    rounds = max(map(len, subsets.values()), default=0)
    in_turn = [subset[i] for i in range(rounds) for _, subset in sorted(subsets.items()) if i < len(subset)]
    return in_turn[:count]


def _begins_with_one_question(sample: Sample) -> bool:
    roles = [message.role for message in sample.messages]
    return roles[roles[0] == "system" :][:2] == ["user", "assistant"]


def _write_question(
    directory: Path,
    number: int,
    sample: Sample,
    answer: GeneratedAnswer,
    limit: int,
    chat: ChatEncoder,
    prompt: PromptFormat,
) -> dict[str, Any]:
    before = sample.messages[: 1 + (sample.messages[0].role == "system")]
    text, system = before[-1].text, before[0].text if len(before) == 2 else ""
    images = sample.images[: text.count(IMAGE_SLOT)]
    encoded = [encode_image(image, prompt.pixels) for image in images]
    grids = np.array([grid for _, grid in encoded], np.int32).reshape(-1, 3)
    files = [f"{number:05d}-{place}.png" for place in range(len(images))]
    for file, image in zip(files, images):
        out = io.BytesIO()
        open_rgb(image).save(out, "PNG")
        (directory / file).write_bytes(out.getvalue())
    if images:
        np.save(directory / f"{number:05d}.npy", np.concatenate([patches for patches, _ in encoded]))
    ids = ([*answer.ids, END] if answer.stopped else answer.ids)[:limit]
    return {
        "key": sample.key,
        "question": text,
        "system": system or prompt.system_prompt or "",
        "images": files,
        "patches": f"{number:05d}.npy" if images else "",
        "grids": grids.tolist(),
        "prompt_ids": chat.encode_prompt(before, grids).tolist(),
        "ids": ids,
        "text": chat.tokenizer.decode(
            [i for i in ids if i != END], skip_special_tokens=True, clean_up_tokenization_spaces=False
        ),
    }


def _ask(
    work: Path,
    source: ModelDirectory,
    exported: Artifact,
    model: ModelDirectory,
    prompt: PromptFormat,
    questions: Sequence[Mapping[str, Any]],
    resources: StageResources,
) -> dict[str, Any]:
    """Return loader -> its result, see `loaders.py`, from a process of the cluster's launcher."""
    directory = (work / JOB_DIR).resolve()
    directory.mkdir(exist_ok=True)
    hf_dir, has_adapter = (work / HF_EXPORT).resolve(), "adapter" in exported.manifest.stats
    vllm, pixels = find_vllm(), prompt.pixels
    request = {
        "hf_dir": str(hf_dir),
        "base_dir": str(source.path.resolve()),
        "adapter_dir": str(hf_dir / ADAPTER_EXPORT),
        "questions": str((work / QUESTIONS).resolve()),
        "results": str(directory),
        "ends": end_ids(hf_dir),
        "longest": max(len(question["prompt_ids"]) + len(question["ids"]) for question in questions) + 1,
        "is_hybrid": model.shape.language.in_chunks,
        "size": {"shortest_edge": pixels.min_pixels, "longest_edge": pixels.max_pixels} if model.shape.vision else None,
    }
    loaders, results = ["transformers", *(["peft"] if has_adapter else [])], {}
    if vllm is not None:
        request |= {"vllm_python": vllm.path, "vllm_environment": vllm.environment()}
        loaders.append(VLLM)
    if vllm is not None and has_adapter:
        adapter = AdapterDirectory(hf_dir / ADAPTER_EXPORT)
        request["lora"] = lora_options(adapter.config["r"], adapter.modules)
        request["overrides"] = missing_keys(source.config)
        if refused := unservable_adapter(adapter.config, adapter.tensors):
            results[VLLM_ADAPTER] = {"error": refused, "rows": [], "dtype": "bfloat16", "seconds": 0.0}
        else:
            loaders.append(VLLM_ADAPTER)
    loaders.append("mlflow")  # the last one, because MLflow keeps its model in memory
    write_json(directory / "job.json", request | {"loaders": loaders})
    arguments = ("-P", str(Path(__file__).with_name("loaders.py").resolve()), str(directory / "job.json"))
    job = Job(str(directory), arguments, directory / "logs" / "verify.log", resources.on_line)
    cluster = resources.cluster
    if cluster.is_here:
        cluster = cluster.model_copy(update={"processes": 1})
    run_job(make_launcher(cluster), job)
    answered = {name: json.loads((directory / f"{name}.json").read_text(encoding="utf-8")) for name in loaders}
    return answered | results


def _judged(
    results: Mapping[str, Any], questions: Sequence[Mapping[str, Any]], layers: int, chat: ChatEncoder
) -> dict[str, Any]:
    """Return loader -> its share of the same answers, the number of answers of each kind, and its first difference. The
    share is None for a server that does not load the directory."""

    def text(token: int) -> str:
        return "the end" if token == END else repr(chat.tokenizer.decode([token]))

    spreads = [row["spread"] for result in results.values() for row in result["rows"] if "spread" in row]
    usual, keys, loaders = statistics.median(spreads or [1.0]), [each["key"] for each in questions], {}
    for name, result in results.items():
        rows, error = result["rows"], result["error"]
        kinds = [judge(row, result["dtype"], layers, usual) for row in rows]
        failed = None if name in SERVERS else 0.0
        loaders[name] = {
            SAME_ANSWERS: failed if error else share(kinds),
            "kinds": counted(kinds),
            "first": f"{name} fails: {error}" if error else first_of(name, kinds, rows, keys, text),
            "dtype": result["dtype"],
            "seconds": result["seconds"],
        }
    return loaders


def _loader_rows(loaders: Mapping[str, Any]) -> list[list[object]]:
    """Return one row per loader for the report and the card: name, share, kinds of answers, first difference."""
    rows: list[list[object]] = []
    for name, loader in loaders.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in loader["kinds"].items())
        value = "not checked" if loader[SAME_ANSWERS] is None else loader[SAME_ANSWERS]
        rows.append([name, value, kinds, loader["first"]])
    return rows + ([] if VLLM in loaders else [[VLLM, "not checked", "", "not installed"]])


def _write_report(work: Path, stats: Mapping[str, Any]) -> None:
    value = "no question was drawn" if stats[SAME_ANSWERS] is None else stats[SAME_ANSWERS]
    summary: dict[str, object] = {"questions": stats["questions"], "same answers": value}
    columns = ["loaded by", "same answers", "answers", "first difference"]
    sections: list[Section] = [Table("Answers of other programs", columns, stats["rows"])]
    if stats["faults"]:
        rows = [[fault] for fault in stats["faults"]]
        sections.append(Table("Differences from the model before training, beside the weights", ["difference"], rows))
    if stats["vllm"]:
        sections.append(Table("Keeps vLLM from serving it as it was trained", ["reason"], [[x] for x in stats["vllm"]]))
    write_report(work, title="Loads elsewhere", summary=summary, sections=sections)


STAGE = Stage("verify", VERSION, verify, on_disk=True)
