"""export: a training's newest checkpoint -> an HF directory that `from_pretrained` loads, and its adapter for PEFT.

hf/model.safetensors  config.json  generation_config.json
hf/tokenizer.json ...  chat_template.jinja  preprocessor_config.json  video_preprocessor_config.json
                                         from the source, with the training's pixel limits and frames of videos
hf/system_prompt.txt  box_format.json   how the training's prompts were made, if they had these; for athanor alone
adapter/adapter_config.json  adapter_model.safetensors   if adapters were trained; they are also merged into hf/
adapter/generation_config.json                           how a server of the base model has to end the adapter's answers
"""

import math
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataset_builders.storage.files import write_json, write_text
from dataset_builders.storage.store import absolute, local_dir
from dataset_builders.videos.sampling import VideoConfig
from stages.export.config import ExportConfig
from stages.shared.artifacts.artifact import Artifact, Input, Stage, StageOutput
from stages.shared.artifacts.verify import file_entries
from stages.shared.artifacts.workers import StageResources
from stages.shared.chat_format.images import load_image_config, write_pixel_limits, write_video_config
from stages.shared.chat_format.prompt import BOX_FORMAT, SYSTEM_PROMPT
from stages.shared.inputs.model_directory import (
    GENERATION_CONFIG,
    ModelDirectory,
    StoredTensor,
    add_end,
    generation_config,
    opened_model,
    read_json,
    safetensors_header,
    stored_tensors,
)
from stages.shared.inputs.remote_code import drop_auto_maps
from stages.shared.inputs.served import completed
from stages.shared.pages.report import Table, write_report
from stages.train.run_trainer import run_trainer
from stages.train.stage import digest_of_base
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT, RUN_JSON
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.contract.run import RunConfig, TrainConfig

# 3: the token that ends a trained turn is among eos_token_id; 4: generation_config.json of an adapter, and the keys of
# config.json that vLLM reads
VERSION = 4
JOB_DIR = "job"  # output directory of the trainer's run, in the work directory
_COPIED = ("*.json", "*.jinja", "*.txt")
_NOT_COPIED = ("model.safetensors.index.json",)  # the exported weights have an index of their own
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def export(config: ExportConfig, inputs: Mapping[str, Input], work_dir: Path, resources: StageResources) -> StageOutput:
    """Run the stage. Inputs: "train", "model" (the HF directory that the training started from), "tokenized"."""
    source, hf_dir = opened_model(inputs["model"]).path, work_dir / HF_EXPORT
    job_dir = work_dir / JOB_DIR
    job_dir.mkdir(exist_ok=True)  # a cluster job that survived a killed flow may still write there
    run = _run_config(inputs, source, job_dir, resources)
    result = run_trainer(run, resources, STAGE.name)
    for name in (HF_EXPORT, ADAPTER_EXPORT) if run.train.adapter else (HF_EXPORT,):
        shutil.rmtree(work_dir / name, ignore_errors=True)
        (job_dir / name).rename(work_dir / name)
    tokenized = inputs["tokenized"].manifest.stats
    copy_processor_files(source, hf_dir, tokenized)
    end = tokenized.get("end_of_turn_id")
    added = end is not None and add_end(hf_dir, end)
    if run.train.adapter:
        # The base model's own file may end elsewhere: vLLM takes this one with --generation-config (config/model.py).
        write_json(work_dir / ADAPTER_EXPORT / GENERATION_CONFIG, generation_config(hf_dir))
    shutil.rmtree(job_dir)  # its paths and times would make every export different
    weights = [file.model_copy(update={"name": f"{HF_EXPORT}/{file.name}"}) for file in result.files]
    files = file_entries(work_dir, STAGE.digested, weights)
    trained = inputs["train"].manifest.stats
    exported = ModelDirectory(hf_dir)
    stats = {
        "dtype": written_dtype(exported.tensors),
        "parameters": exported.count_parameters(),
        "active_parameters": exported.shape.active_parameters,
        "carried": exported.count_copied(run.train),
        "steps": trained["steps"],
        "checkpoint": trained["checkpoint"],
    }
    if exported.shape.vision:
        pixels = load_image_config(exported)
        stats["pixels"] = {"shortest_edge": pixels.min_pixels, "longest_edge": pixels.max_pixels}
    if tokenized.get("videos"):
        stats["videos"] = tokenized["videos"] | {"prompt": tokenized["video_prompt"]}
    if added:
        stats["added_end"] = end
    if run.train.mtp_loss_scaling_factor:
        stats["mtp"] = sum(exported.count_copied().values()) - sum(stats["carried"].values())
    if run.train.adapter:
        header = safetensors_header(work_dir / ADAPTER_EXPORT / ADAPTER_WEIGHTS)
        settings = read_json(work_dir / ADAPTER_EXPORT / ADAPTER_CONFIG)
        stats["adapter"] = run.train.adapter.model_dump(mode="json") | {
            "modules": sum(".lora_A." in name for name in header),
            "modules_to_save": settings["modules_to_save"] or [],
            "parameters": sum(math.prod(entry["shape"]) for entry in header.values()),
        }
    _write_report(work_dir, stats)
    return StageOutput(files=files, stats=stats)


def _write_report(work_dir: Path, stats: Mapping[str, Any]) -> None:
    parameters = Table("Parameters", ("part", "number"), list(stats["parameters"].items()))
    summary = {"dtype": stats["dtype"], "parameters": sum(stats["parameters"].values()), "steps": stats["steps"]}
    if "pixels" in stats:
        low, high = stats["pixels"].values()
        summary["area of a picture, in preprocessor_config.json"] = f"{low:,} to {high:,} pixels"
    sections = [parameters]
    if stats["carried"]:
        copied = [(f"{prefix}*", number) for prefix, number in stats["carried"].items()]
        sections.append(Table("Copied from the base model, not trained", ("names", "tensors"), copied))
    if "added_end" in stats:
        summary["end of the trained turns, added to generation_config.json"] = stats["added_end"]
    if "mtp" in stats:
        summary["tensors of multi-token prediction, trained"] = stats["mtp"]
    if "adapter" in stats:
        rows = [(name, ", ".join(v) if isinstance(v, list) else v) for name, v in stats["adapter"].items()]
        sections.append(Table("Adapter, merged into the weights and as a separate file", ("", "value"), rows))
    write_report(work_dir, title="Exported model", summary=summary, sections=sections)


def _run_config(inputs: Mapping[str, Input], source: Path, job_dir: Path, resources: StageResources) -> RunConfig:
    """Return the training's own config, but with this run's layout: a checkpoint can be read in any layout. The
    settings that determine the weights come from the manifest, which has a digest; run.json has none."""
    trained: Artifact = inputs["train"]
    run = RunConfig.model_validate_json((trained.dir / RUN_JSON).read_text(encoding="utf-8"))
    checkpoint = trained.manifest.stats["checkpoint"]
    return run.model_copy(
        update={
            "task": "export",
            "train": TrainConfig.model_validate(trained.manifest.config),
            "fingerprint": trained.manifest.fingerprint,
            "hf_dir": source.resolve(),
            "base_digest": digest_of_base(inputs["model"]),
            "tokenized_dir": absolute(inputs["tokenized"].dir),
            "output_dir": job_dir.resolve(),
            "checkpoint_dir": local_dir(trained.dir / checkpoint).resolve(),
            "execution": run.execution.model_copy(update={"parallel": resources.trainer.parallel}),
            "num_threads": resources.cluster.num_threads,
        }
    )


def copy_processor_files(source: Path, hf_dir: Path, tokenized: Mapping[str, Any]) -> None:
    """Copy tokenizer, template and configs of the source; write pixel limits, the frames of videos, system prompt, form
    of boxes, dtype, and what vLLM reads of config.json."""
    for file in sorted({f for pattern in _COPIED for f in source.glob(pattern)}):
        if file.name not in _NOT_COPIED and not file.name.startswith(("manifest.", "report.")):
            shutil.copyfile(file, hf_dir / file.name)
    drop_auto_maps(hf_dir)
    write_pixel_limits(hf_dir, tokenized.get("min_pixels"), tokenized.get("max_pixels"))
    if tokenized.get("videos"):
        write_video_config(hf_dir, VideoConfig.model_validate(tokenized["videos"]))
    dtype = written_dtype(stored_tensors(hf_dir))
    write_json(hf_dir / "config.json", completed(_with_dtype(read_json(hf_dir / "config.json"), dtype)))
    (hf_dir / SYSTEM_PROMPT).unlink(missing_ok=True)
    if tokenized.get("system_prompt"):
        write_text(hf_dir / SYSTEM_PROMPT, tokenized["system_prompt"])
    if tokenized.get("boxes"):  # else a form that the source has still holds: nothing was trained in another one
        write_json(hf_dir / BOX_FORMAT, tokenized["boxes"])


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    fixed = {k: _with_dtype(v, dtype) if isinstance(v, dict) else v for k, v in config.items()}
    for name in ("dtype", "torch_dtype"):
        if name in fixed:
            fixed[name] = dtype
    return fixed


def written_dtype(tensors: Mapping[str, StoredTensor]) -> str:
    """Return the dtype of most numbers of a model, in torch's spelling; a few tensors may differ."""
    numbers: Counter[str] = Counter()
    for tensor in tensors.values():
        numbers[tensor.dtype] += math.prod(tensor.shape)
    ((dtype, _),) = numbers.most_common(1)
    return _DTYPES.get(dtype, dtype)


STAGE = Stage("export", VERSION, export, on_disk=True, digested=(f"{HF_EXPORT}/*", f"{ADAPTER_EXPORT}/*"))
