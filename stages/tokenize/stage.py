"""tokenize: sample shards -> tokenized shards, which the trainer reads; one output shard for each input shard.

train/shard-00000.tar    input_ids, loss_mask, image_grid_thw and uint8 patches (or the images) of each sample
index/00000.parquet      the byte range and the lengths of each sample
quarantine.jsonl         samples that were left out: key, reason, detail
shortened.jsonl          samples that lost their last turns: key, turns_kept, turns_before
report.json, report.html some samples, token by token, with the trained tokens in colour; distributions

If the chat template rewrites earlier turns, a conversation becomes several samples (`reasoning.py` in
stages/shared/chat_format). Their keys end in -t and the number of their last answer.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from dataset_builders.contracts.manifest import Manifest
from dataset_builders.contracts.sample import SPLITS
from dataset_builders.contracts.shard_io import finished_shard
from dataset_builders.contracts.tokenized import INDEX, INDEX_SCHEMA, SIZES, IndexWriter, PixelStore, iter_index
from dataset_builders.storage.files import atomic_path, read_sealed
from dataset_builders.storage.store import StorePath
from stages.shared.artifacts.artifact import Artifact, External, Input, Stage, StageOutput
from stages.shared.artifacts.left_out import (
    QUARANTINE,
    LeftOut,
    check_lost,
    count_reasons,
    left_out_table,
    write_left_out,
)
from stages.shared.artifacts.workers import StageResources, run_tasks
from stages.shared.chat_format.chat import ChatEncoder
from stages.shared.chat_format.images import load_image_config, load_video_config
from stages.shared.inputs.model_directory import opened_model
from stages.shared.pages.report import Histogram, Table, write_report
from stages.shared.pages.shown_numbers import counted
from stages.tokenize.config import TokenizeConfig
from stages.tokenize.shard import ShardNotes, ShardTask, encoder_of, notes_path, tokenize_shard

VERSION = 4  # 3: transparent values of PNGs of 2, 4 and 16 bits; 4: records say which grids are of videos
SHORTENED = "shortened.jsonl"
_COUNTED_SAMPLES = 1_000_000  # the histograms of a larger index count this number of samples, evenly spread
_PROCESS_WORTH = 10.0  # seconds of work worth a process, which imports torch and transformers in up to five seconds


def _run(
    config: TokenizeConfig, inputs: Mapping[str, Input], work: StorePath, resources: StageResources
) -> StageOutput:
    samples, processor = inputs["samples"], inputs["processor"]
    assert isinstance(samples, Artifact) and isinstance(processor, External)
    model = opened_model(processor)
    chat = encoder_of(processor.dir, processor.digest, config, model)  # reports errors before a worker starts
    pixels = PixelStore(codec=config.codec, config=load_image_config(model, config.min_pixels, config.max_pixels))
    videos = load_video_config(model, config.videos)
    tasks = (
        ShardTask(
            samples=samples.dir,
            shard=shard,
            directory=work,
            hf_dir=processor.dir,
            processor_digest=processor.digest,
            pixels=pixels,
            videos=videos,
            config=config,
        )
        for shard in samples.manifest.shards
    )
    manifest = samples.manifest
    resources = resources.at_most(_worthwhile_workers(manifest))
    finished = 0
    for i, _ in run_tasks(tokenize_shard, tasks, resources):
        finished += manifest.shards[i].num_samples
        resources.report(finished, manifest.num_samples)
    names = [shard.name for shard in manifest.shards]
    left_out, stats_of_notes = _collect_notes(work, names, chat)
    stats = _stats(work, chat, pixels)
    skips, limit = count_reasons(left_out), ("tokenize.max_skip_fraction", config.max_skip_fraction)
    check_lost(
        skips, stats["total"]["num_samples"] + len(left_out), limit, samples.dir, str(work / QUARANTINE), left_out
    )
    # The form of boxes is that of the prompts, as the system prompt is; null if no sample has boxes.
    boxes = config.boxes.model_dump(mode="json") if stats_of_notes.get("boxed") else None
    has_videos = videos is not None and "num_videos" in stats_of_notes
    stats |= stats_of_notes | {"system_prompt": config.system_prompt, "boxes": boxes}
    stats["videos"] = videos.model_dump(mode="json") if has_videos else None
    write_tokenize_report(work, left_out, stats, pixels)
    shards = [finished_shard(work, name) for name in names]
    for name in names:
        notes_path(work, name).unlink()
    return StageOutput(shards=shards, skips=skips, stats=stats)


def _worthwhile_workers(manifest: Manifest) -> int:
    """Return the number of processes worth starting, for an estimated 1,500 texts/s, 35 MB/s of images and, of videos,
    400 frames/s."""
    size, frames = sum(shard.size_bytes for shard in manifest.shards), manifest.stats.get("videos", {}).get("frames", 0)
    return max(int((manifest.num_samples / 1500 + size / 35e6 + frames / 400) / _PROCESS_WORTH), 1)


def _collect_notes(work: StorePath, names: Sequence[str], chat: ChatEncoder) -> tuple[list[LeftOut], dict[str, Any]]:
    """Write the index, the quarantine and the list of shortened samples from the shards' notes. Return the samples left
    out, and the manifest's figures of samples: shortened, checked, cut, with reasoning, with boxes, with videos."""
    left_out: list[LeftOut] = []
    against: set[str] = set()
    counts: Counter[str] = Counter()
    index = IndexWriter(work)
    with atomic_path(work / SHORTENED) as tmp, tmp.open("w", encoding="utf-8") as shortened:
        for name in names:
            notes = ShardNotes.model_validate_json(read_sealed(notes_path(work, name)))
            index.add(pa.Table.from_pylist(notes.rows, INDEX_SCHEMA))
            shortened.writelines(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in notes.shortened)
            left_out += notes.left_out
            counts["shortened"] += len(notes.shortened)
            counts.update(
                notes.model_dump(
                    include={"num_checked", "num_cut", "num_parts", "num_reasoned", "num_boxed", "num_videos"}
                )
            )
            against.add(notes.pixels_against)
    index.close()
    write_left_out(work, left_out)
    checked = {"samples": counts["num_checked"], "pixels_against": " and ".join(sorted(against))}
    figures = {"num_shortened": counts["shortened"], "checked": checked}
    if counts["num_cut"]:
        figures["cut"] = {"conversations": counts["num_cut"], "samples": counts["num_parts"]}
    if counts["num_reasoned"]:
        figures["reasoning"] = {"answers": counts["num_reasoned"], "is_learnt": chat.format.opened is not None}
    if counts["num_videos"]:
        figures["num_videos"] = counts["num_videos"]
        figures["video_prompt"] = chat.video_prompt_digest()
    if counts["num_boxed"]:
        figures["boxed"] = counts["num_boxed"]
    return left_out, figures


def _stats(work: StorePath, chat: ChatEncoder, pixels: PixelStore) -> dict[str, Any]:
    splits: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    subsets: dict[str, Counter[str]] = {}
    for table in iter_index(work):
        for column, groups in (("split", splits), ("subset", subsets)):
            rows = table.group_by(column).aggregate([([], "count_all"), *((name, "sum") for name in SIZES)])
            for row in rows.to_pylist():
                sums = {"num_samples": row["count_all"], **{name: row[f"{name}_sum"] for name in SIZES}}
                groups.setdefault(row[column], Counter()).update(sums)
    return {
        "pixels": pixels.model_dump(mode="json"),
        "min_pixels": pixels.config.min_pixels,
        "max_pixels": pixels.config.max_pixels,
        "vocab_size": chat.vocab_size,
        **(asdict(chat.images) if chat.images else {}),
        "end_of_turn_id": chat.end_of_turn_id,
        "total": _sums(sum(splits.values(), Counter())),
        "splits": {split: _sums(sums) for split, sums in splits.items()},
        "subsets": {name: _sums(sums) for name, sums in sorted(subsets.items())},
    }


def _sums(sums: Mapping[str, int]) -> dict[str, int]:
    return {name: sums.get(name, 0) for name in ("num_samples", *SIZES)}


def write_tokenize_report(
    work: StorePath, left_out: Sequence[LeftOut], stats: Mapping[str, Any], pixels: PixelStore
) -> None:
    """Write report.json to `work`, which already has the index."""
    total, splits, checked = stats["total"], stats["splits"], stats["checked"]
    summary = {
        "samples": {split: splits[split]["num_samples"] for split in splits},
        "tokens": total["num_tokens"],
        "loss_tokens": total["num_loss_tokens"],
        "images_and_frame_pairs" if stats.get("videos") else "images": total["num_images"],
        "patches": total["num_patches"],
        "pixels": f"{pixels.codec}, {pixels.config.min_pixels} to {pixels.config.max_pixels} an image",
        "left_out": len(left_out),
        "shortened": stats["num_shortened"],
    }
    if cut := stats.get("cut"):
        summary["cut"] = (
            f"{cut['conversations']:,} conversations were cut into {cut['samples']:,} samples, as few as are exact: "
            "the chat template writes a turn in another way once it is history"
        )
    if reasoning := stats.get("reasoning"):
        learnt = "learnt" if reasoning["is_learnt"] else "left out (tokenize.learn.reasoning, or the template)"
        summary["reasoning"] = f"of {reasoning['answers']:,} answers, {learnt}"
    if videos := stats.get("videos"):
        frames = f"{videos['fps']:g} frames a second, {videos['min_frames']} to {videos['max_frames']}"
        area = f"{videos['min_pixels']} to {videos['max_pixels']} pixels a video"
        summary["videos"] = f"{stats['num_videos']:,}, {frames}, {area}"
    if boxes := stats.get("boxes"):
        how = ", ".join(boxes[name] for name in ("convention", "form"))
        summary["boxes"] = f"in {stats['boxed']:,} conversations: {how}, in the {boxes['order']} order"
    against = checked["pixels_against"].partition(";")[0] + (", of videos PyAV's" if stats.get("videos") else "")
    summary["checked"] = f"{counted(checked['samples'], 'sample')}, with transformers' tokenizer and {against}"
    step = -(-total["num_samples"] // _COUNTED_SAMPLES) or 1
    lengths = {"num_tokens": [], "num_loss_tokens": [], "num_patches": []}
    for table in iter_index(work):
        for name, parts in lengths.items():
            parts.append(table[name].to_numpy()[::step])
    tokens, loss_tokens, patches = (np.concatenate(parts) for parts in lengths.values())
    columns = ("num_samples", *SIZES)
    sections = [
        Histogram("Tokens of a sample", tokens, "tokens"),
        Histogram("Loss tokens of a sample", loss_tokens, "loss tokens"),
        Histogram("Patches of a sample", patches, "patches before merging"),
        Table(
            "Subsets",
            ["subset", *(name.removeprefix("num_") for name in columns)],
            [[name, *(sums[c] for c in columns)] for name, sums in stats["subsets"].items()],
        ),
        left_out_table(left_out),
    ]
    write_report(work, title="Tokenized samples", summary=summary, sections=sections)


STAGE = Stage(
    "tokenize",
    VERSION,
    _run,
    digested=(f"{INDEX}/*.parquet", QUARANTINE, SHORTENED),
    contents="stages.shared.preview.render:stage_contents",
)
