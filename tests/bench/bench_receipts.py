"""transformers on the samples of a finished run of the recipe `receipts`: the same bins in the same order, the same
optimizer, the same questions and scores.

    athanor run receipts --root ROOT
    python -m tests.bench.bench_receipts --root ROOT --train --score --draw --out DIRECTORY

--train trains and leaves the model and its losses in DIRECTORY; it needs the run's bins alone, and the same --set.
--score answers and scores it, and prints the table. --draw needs the run alone, and draws ten of its held-out receipts
with their parses: docs/pictures/receipts_read.png. transformers: float32 weights under bf16 autocast, sdpa without
cuDNN, samples of like length padded to the longest, torch's AdamW. On a GPU its vision encoder attends all images of a
batch in one call, as with flash-attn, by the kernel that torch brings: sdpa would take one call per image and layer.
"""

import argparse
import io
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from transformers import AttentionInterface

from dataset_builders.embedded.receipts import receipt_row
from flows.pipeline.recipe import load_recipe
from stages.answer.config import AnswerConfig
from stages.answer.records import ANSWERS_JSONL, iter_jsonl
from stages.answer.stage import STAGE as ANSWER
from stages.artifacts.artifact import Artifact
from stages.artifacts.run_stage import run_stage
from stages.evaluate.config import EvaluateConfig
from stages.evaluate.stage import STAGE as EVALUATE
from stages.inputs.hf_directory import hf_dir_of, model_input
from tests.bench.bench_loss_curve import bin_reader, load_transformers, train_transformers
from tests.bench.host import describe
from trainer.contract.answer import read_metrics
from trainer.contract.run import TrainConfig

MICRO_BATCH = 128
WINDOWS = 10
FLASH = "flash_of_torch"  # transformers looks for "flash" in the name


def artifact(root: Path, stage: str) -> Artifact:
    """Return the only artifact of a stage in a root."""
    found = [path.parent for path in (root / "artifacts" / stage).glob("*/manifest.json")]
    if len(found) != 1:
        raise SystemExit(f"{root} has {len(found)} artifacts of {stage}; run the recipe into a root of its own")
    return Artifact.load(found[0])


def attend_images(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention (1, P, h, d) of the patches of each image among each other.

    Args:
        query: (1, h, P, d), like key and value.
        cu_seq_lens_q: (images + 1,) cumulated numbers of patches.
    """
    query, key, value = (x[0].transpose(0, 1).bfloat16().contiguous() for x in (query, key, value))
    bounds = cu_seq_lens_q.int()
    attended = torch.ops.aten._flash_attention_forward(
        *(query, key, value, bounds, bounds, max_length_q, max_length_q, 0.0, False, False), scale=scaling
    )[0]
    return attended[None], None


def train(root: Path, out: Path, config: TrainConfig, max_seconds: float) -> None:
    """Write DIRECTORY/hf and DIRECTORY/losses.json. The training ends early after `max_seconds`."""
    source, bins = hf_dir_of(artifact(root, "embedded_model")), artifact(root, "plan_bins")
    reader = bin_reader(artifact(root, "tokenize").dir, bins.dir, source, bins.manifest.config["seq_len"])
    model, losses = load_transformers(source), []
    if torch.cuda.is_available():
        AttentionInterface.register(FLASH, attend_images)
        model.model.visual.config._attn_implementation = FLASH
    start = time.perf_counter()
    for loss in train_transformers(model, reader, config, MICRO_BATCH):
        losses.append(loss)
        if len(losses) % 100 == 0:
            print(
                f"step {len(losses)}: loss {np.mean(losses[-100:]):.4f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )
        if time.perf_counter() - start > max_seconds:
            break
    seconds = time.perf_counter() - start
    shutil.copytree(source, out / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(out / "hf")
    (out / "losses.json").write_text(json.dumps({"losses": losses, "seconds": seconds}))


def score(root: Path, out: Path) -> dict[str, Any]:
    """Answer and score transformers' model as the run did its own; return the statistics of the evaluation."""
    samples, tokenized = artifact(root, "convert"), artifact(root, "tokenize")
    config = AnswerConfig.model_validate(artifact(root, "answer").manifest.config)
    asked = {"hf": model_input(out / "hf"), "samples": samples, "tokenized": tokenized}
    answers = run_stage(ANSWER, config, asked, out / "root").artifact
    config = EvaluateConfig.model_validate(artifact(root, "evaluate").manifest.config)
    return run_stage(EVALUATE, config, {"answers": answers, "samples": samples}, out / "root").artifact.manifest.stats


def report(root: Path, out: Path, peer: dict[str, Any]) -> None:
    """Print the table of scores and losses."""
    rows, told = read_metrics(artifact(root, "train").dir), json.loads((out / "losses.json").read_text())
    ours, theirs = np.array([row.loss for row in rows]), np.array(told["losses"])
    own_seconds = sum(row.step_seconds for row in rows)
    print("| | athanor | transformers |\n| --- | ---: | ---: |")
    print(f"| seconds of training | {own_seconds:.0f} | {told['seconds']:.0f} |")
    print(f"| steps | {len(rows)} | {len(theirs)} |")
    rates = rows[-1].tokens / own_seconds, rows[len(theirs) - 1].tokens / told["seconds"]
    print(f"| useful tokens/s | {rates[0]:,.0f} | {rates[1]:,.0f} |")
    own = artifact(root, "evaluate").manifest.stats
    for subset, scores in own["scores"].items():
        for name in scores.keys() & peer["scores"][subset].keys():
            print(f"| {subset} {name} | {scores[name]} | {peer['scores'][subset][name]} |")
        print(f"| {subset} headline | {own['headlines'][subset]} | {peer['headlines'][subset]} |")
    width = max(1, len(ours) // WINDOWS)
    for first in range(0, len(ours), width):
        window = slice(first, first + width)
        peer_loss = f"{theirs[window].mean():.4f}" if len(theirs) >= first + width else "-"
        print(f"| loss, steps {first + 1} to {first + width} | {ours[window].mean():.4f} | {peer_loss} |")


def fields(tree: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, text) of the fields of a parse. An item that is alone is a list of one here too."""
    if isinstance(tree, dict):
        for key in sorted(tree):
            inner = [tree[key]] if key == "menu" and not isinstance(tree[key], list) else tree[key]
            yield from fields(inner, f"{path}.{key}" if path else key)
    elif isinstance(tree, list):
        for number, item in enumerate(tree):
            yield from fields(item, f"{path}[{number}]")
    else:
        yield path, str(tree)


def draw_receipt(number: int, answer: str) -> Image.Image:
    """Return a held-out receipt above its parse: right fields in green, wrong ones in red with what is printed."""
    row = receipt_row(0, "validation", number)  # the seed of the recipe's data
    image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
    image = image.resize((image.width * 2 // 3, image.height * 2 // 3))
    printed = dict(fields(json.loads(row["ground_truth"])["gt_parse"]))
    read = dict(fields(json.loads(answer)))
    names = [*printed, *(name for name in read if name not in printed)]
    sheet = Image.new("RGB", (560, image.height + 24 * len(names) + 48), "white")
    sheet.paste(image, (16, 16))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=17)
    for place, name in enumerate(names):
        is_right = printed.get(name) == read.get(name)
        text = f"{name}: {read.get(name)}" + ("" if is_right else f"   (printed: {printed.get(name)})")
        fill = (20, 110, 40) if is_right else (190, 20, 20)
        draw.text((16, image.height + 32 + 24 * place), text, fill=fill, font=font)
    return sheet


def draw_answers(root: Path, out: Path) -> None:
    """Draw the first ten held-out receipts, five in a row."""
    texts = [row["answer"] for row in iter_jsonl(artifact(root, "answer").dir / ANSWERS_JSONL)][:10]
    cells = [draw_receipt(number, text) for number, text in enumerate(texts)]
    heights = [max(cell.height for cell in cells[first : first + 5]) for first in (0, 5)]
    sheet = Image.new("RGB", (5 * cells[0].width, sum(heights)), (225, 225, 225))
    for number, cell in enumerate(cells):
        sheet.paste(cell, (number % 5 * cell.width, number // 5 * heights[0]))
    sheet = sheet.resize((sheet.width * 3 // 5, sheet.height * 3 // 5), Image.Resampling.LANCZOS)
    sheet.quantize(96).save(out / "receipts_read.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="as for `athanor run receipts`")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="end the training of --train early")
    parser.add_argument("--score", action="store_true")
    parser.add_argument("--draw", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(", ".join(describe()), flush=True)
    if args.train:
        train(args.root, args.out, load_recipe("receipts", args.overrides).config.train, args.max_seconds)
    if args.score:
        report(args.root, args.out, score(args.root, args.out))
    if args.draw:
        draw_answers(args.root, args.out)


if __name__ == "__main__":
    main()
