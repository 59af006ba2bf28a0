"""A task directory for lmms-eval: the same held-out questions, asked and scored offline by an independent tool.

    <name>.yaml       the task
    utils.py          its functions: stages/evaluate/lmms_eval/functions.py
    heldout.parquet   one row per question: the conversation before it, its images, the right answers
    README.md         the command

The reasons why other programs give other scores, and the measures of this task (lmms-eval 0.7.3, `--model qwen3_vl`):

    system prompt     that model inserts one into every conversation, by default "You are a helpful assistant.", at
                      least an empty one; the rows have the export's own or none, and utils.py accepts no other
    pixels            it resizes images with qwen_vl_utils, unlike the processor and with its own limits; the rows
                      have the images as resized for training, which it does not change. But it enlarges images of fewer
                      than MIN_PIXELS
    precision         bfloat16 there; float32 in our own evaluation on CPU
    end of an answer  the tokenizer's end-of-turn token; the answer is cut after max_new_tokens, like ours
    class of model    chosen by the path: a directory with, say, A3B in its name is loaded as a mixture of experts

lmms-eval's `huggingface` model cannot load Qwen3-VL: it chooses the class without a language head.
"""

import inspect
import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, Sample, SkipSample
from dataset_builders.contracts.tokenized import PixelConfig
from dataset_builders.errors import InputError
from dataset_builders.pictures.pixels import encode_image
from dataset_builders.storage.files import atomic_path, write_text
from stages.evaluate.lmms_eval import functions as lmms_eval_functions
from stages.shared.chat_format.images import patches_png
from stages.shared.chat_format.prompt import PromptFormat, read_prompt_format
from stages.shared.inputs.model_directory import ModelDirectory

LMMS_EVAL = "0.7.3"  # the version that this was tested with
# qwen3_vl imports decord, which lmms-eval does not require; it patches filelock._api, which filelock 4.3 lacks.
INSTALL = f"pip install lmms-eval=={LMMS_EVAL} decord 'filelock<4.3'"
LMMS_EVAL_MODEL = "qwen3_vl"  # for Qwen3-VL and Qwen3.5, dense and with experts
HELDOUT = "heldout.parquet"
MIN_PIXELS = 4 * 32 * 32  # qwen_vl_utils 0.0.14 enlarges smaller images, to four tokens of 32 x 32
METRICS = tuple(lmms_eval_functions.METRICS)
_FUNCTIONS = ("doc_to_messages", "doc_to_visual", "doc_to_text", "doc_to_target", "process_results")
_FLUSH_ROWS = 256
_COLUMNS = {"key": "string", "turn": "int32", "subset": "string", "metric": "string", "messages": "string"}
# `datasets` decodes a column to PIL images only if the metadata declares it; from a plain struct it returns bytes.
_FEATURES = {
    **{name: {"dtype": dtype, "_type": "Value"} for name, dtype in _COLUMNS.items()},
    "references": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
    "images": {"feature": {"_type": "Image"}, "_type": "List"},
}
TASK_SCHEMA = pa.schema(
    [
        *((name, pa.type_for_alias(dtype)) for name, dtype in _COLUMNS.items()),
        ("references", pa.list_(pa.string())),
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)
_COMMAND = (
    f"python -m lmms_eval --model {LMMS_EVAL_MODEL} --model_args pretrained=HF_DIR --include_path {{directory}} "
    "--tasks {name} --batch_size 1 --log_samples --output_path results"
)
_README = """# {name}

{count} questions on held-out samples, to be asked of an exported model offline by
[lmms-eval](https://github.com/EvolvingLMMs-Lab/lmms-eval), in an environment of its own (`{install}`).
Give the directory of the trained model, and then that of the model before training, for HF_DIR:

```sh
{command}
```

Without a GPU add `,device=cpu,device_map=cpu` to the value of `--model_args`.

The pictures are scaled already as training scaled them, so that `--model qwen3_vl` leaves them alone{small}.
lmms-eval adds a system prompt to every conversation; `utils.py` drops it, as the rows carry the right one. Do not give
`--force_simple`: only the chat form of a model sees earlier turns. `dataset_kwargs.data_files` in the YAML file is an
absolute path: edit it after moving the directory. lmms-eval loads a model as a mixture of experts if its path has
letters and digits like `A3B`, and only then: make a link with a name that fits.
"""
_SMALL = """,
but for {count} questions with a picture of fewer than {pixels} pixels, which it enlarges: these cannot be compared"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LmmsEvalTask:
    """A task to write."""

    name: str  # lower-case letters, digits, _ and -
    max_new_tokens: int  # an answer is cut after this number of tokens
    metrics: Mapping[str, str]  # subset -> metric, a name in METRICS; other subsets have exact_match
    # (key, turn) of each question, for example those of our own evaluation; None: every turn of every sample.
    questions: Collection[tuple[str, int]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenTask:
    """A task that was written."""

    num_questions: int
    num_small: int  # questions with an image of fewer than MIN_PIXELS, which lmms-eval enlarges


def write_lmms_eval_task(directory: Path, hf_dir: Path, samples: Iterable[Sample], task: LmmsEvalTask) -> WrittenTask:
    """Write the task to `directory`, which is created. `hf_dir` is the exported model: the questions
    have its system prompt, and boxes in its form. InputError: lmms-eval lacks a metric, or there is no question."""
    for subset, metric in task.metrics.items():
        if metric not in METRICS:
            raise InputError(f"metrics.{subset}={metric} is not scored in lmms-eval; choose from {', '.join(METRICS)}")
    directory.mkdir(parents=True, exist_ok=True)
    subsets, questions, small = set(), 0, 0
    with atomic_path(directory / HELDOUT) as tmp, pq.ParquetWriter(tmp, TASK_SCHEMA) as writer:
        rows: list[dict[str, object]] = []
        for row, is_small in _rows(samples, task, read_prompt_format(ModelDirectory(hf_dir))):
            rows.append(row)
            questions += 1
            small += is_small
            subsets.add((row["subset"], row["metric"]))
            if len(rows) == _FLUSH_ROWS:
                writer.write_table(pa.Table.from_pylist(rows, TASK_SCHEMA))
                rows = []
        writer.write_table(pa.Table.from_pylist(rows, TASK_SCHEMA))
    if not questions:
        raise InputError(f"no held-out question for the lmms-eval task {task.name}; raise convert.heldout_fraction")
    write_text(directory / "utils.py", inspect.getsource(lmms_eval_functions))
    write_text(directory / f"{task.name}.yaml", _yaml(directory, task, sorted(subsets)))
    command = _COMMAND.format(directory=shlex.quote(str(directory)), name=task.name)
    note = _SMALL.format(count=small, pixels=MIN_PIXELS) if small else ""
    about = {"name": task.name, "count": questions, "install": INSTALL, "command": command, "small": note}
    write_text(directory / "README.md", _README.format(**about))
    return WrittenTask(num_questions=questions, num_small=small)


def _rows(
    samples: Iterable[Sample], task: LmmsEvalTask, prompt: PromptFormat
) -> Iterator[tuple[dict[str, object], bool]]:
    """Yield one row per question, and whether one of its images is below MIN_PIXELS."""
    for sample in map(prompt.with_boxes, samples):
        turn = -1
        for place, message in enumerate(sample.messages):
            if message.role != "assistant":
                continue
            turn += 1
            if task.questions is not None and (sample.key, turn) not in task.questions:
                continue
            before = list(sample.messages[:place])
            if prompt.system_prompt and not any(m.role == "system" for m in before):
                before.insert(0, Message(role="system", text=prompt.system_prompt))
            shown = sum(m.text.count(IMAGE_SLOT) for m in before if m.role == "user")
            try:
                images = [_as_trained(image, prompt.pixels) for image in sample.images[:shown]]
            except SkipSample:  # our own evaluation leaves it out as well
                continue
            row = {
                "key": sample.key,
                "turn": turn,
                "subset": sample.subset,
                "metric": task.metrics.get(sample.subset, "exact_match"),
                # As stages/shared/chat_format/text.py gives them to the template: answers without outer white space.
                "messages": json.dumps(
                    [{"role": m.role, "text": m.text.strip() if m.role == "assistant" else m.text} for m in before],
                    ensure_ascii=False,
                ),
                "references": list(message.references) or [message.text.strip()],
                "images": [{"bytes": data, "path": None} for data, _ in images],
            }
            yield row, any(size < MIN_PIXELS for _, size in images)


def _as_trained(image: bytes, pixels: PixelConfig) -> tuple[bytes, int]:
    """Return a PNG of the pixels that the vision encoder gets, and their number."""
    patches, grid = encode_image(image, pixels)
    patch = pixels.patch_format.patch_size
    side = patch * int(max(grid))
    return patches_png([patches], grid, pixels.patch_format, side), patch * patch * int(grid[1] * grid[2])


def _yaml(directory: Path, task: LmmsEvalTask, subsets: list[tuple[str, str]]) -> str:
    metrics = sorted({metric for _, metric in subsets})
    metrics += [f"{metric}_{subset}" for subset, metric in subsets]
    settings = {
        "task": task.name,
        "dataset_path": "parquet",
        "dataset_kwargs": {"data_files": {"test": str((directory / HELDOUT).resolve())}},
        "test_split": "test",
        "output_type": "generate_until",
        "generation_kwargs": {"max_new_tokens": task.max_new_tokens, "temperature": 0, "do_sample": False},
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics],
        "metadata": [{"version": 1.0}],
    }
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    return text + "".join(f"{name}: !function utils.{name}\n" for name in _FUNCTIONS)
