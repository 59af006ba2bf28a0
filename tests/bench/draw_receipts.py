"""Two pictures of a run of the recipe `receipts`: its losses beside transformers', and ten receipts with their parses.

    python -m tests.bench.draw_receipts --metrics TRAIN/metrics.jsonl --answers ANSWER/answers.jsonl \
        --losses PEER/losses.json --out DIRECTORY

TRAIN and ANSWER are artifacts of the run, PEER is a directory of bench_receipts.
"""

import argparse
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dataset_builders.embedded.receipts import receipt_row
from stages.answer.records import iter_jsonl

SEED = 0  # of the recipe's data
COLUMN, LINE, MARGIN = 560, 24, 16  # pixels
RIGHT, WRONG = (20, 110, 40), (190, 20, 20)


def leaves(tree: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a parse: (path, text)."""
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from leaves(tree[key], f"{path}.{key}" if path else key)
    elif isinstance(tree, list):
        for number, item in enumerate(tree):
            yield from leaves(item, f"{path}[{number}]")
    else:
        yield path, str(tree)


def fields(parse: dict) -> dict[str, str]:
    """Return path -> text. A menu of one item is a list here too."""
    menu = parse.get("menu", [])
    return dict(leaves({**parse, "menu": menu if isinstance(menu, list) else [menu]}))


def draw_receipt(number: int, answer: str) -> Image.Image:
    """Return a held-out receipt above its parse: right fields in green, wrong ones in red with what is printed."""
    row = receipt_row(SEED, "validation", number)
    image = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB")
    image = image.resize((image.width * 2 // 3, image.height * 2 // 3))
    printed, read = fields(json.loads(row["ground_truth"])["gt_parse"]), fields(json.loads(answer))
    names = [*printed, *(name for name in read if name not in printed)]
    sheet = Image.new("RGB", (COLUMN, image.height + LINE * len(names) + 3 * MARGIN), "white")
    sheet.paste(image, (MARGIN, MARGIN))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=17)
    for place, name in enumerate(names):
        is_right = printed.get(name) == read.get(name)
        text = f"{name}: {read.get(name)}" + ("" if is_right else f"   (printed: {printed.get(name)})")
        at = (MARGIN, image.height + 2 * MARGIN + LINE * place)
        draw.text(at, text, fill=RIGHT if is_right else WRONG, font=font)
    return sheet


def draw_answers(answers: Path, out: Path) -> None:
    """Draw the first ten held-out receipts, five in a row."""
    texts = [row["answer"] for row in iter_jsonl(answers)][:10]
    cells = [draw_receipt(number, text) for number, text in enumerate(texts)]
    rows = [cells[:5], cells[5:]]
    heights = [max(cell.height for cell in row) for row in rows]
    sheet = Image.new("RGB", (5 * COLUMN, sum(heights)), (225, 225, 225))
    for line, row in enumerate(rows):
        for column, cell in enumerate(row):
            sheet.paste(cell, (column * COLUMN, sum(heights[:line])))
    sheet = sheet.resize((sheet.width * 3 // 5, sheet.height * 3 // 5), Image.Resampling.LANCZOS)
    sheet.quantize(96).save(out / "receipts_read.png")


def draw_curves(metrics: Path, theirs: Sequence[float], out: Path) -> None:
    """Draw the losses of the training and of the held-out receipts, and the first steps beside transformers'."""
    plt.switch_backend("Agg")
    rows = list(iter_jsonl(metrics))
    ours = [row["loss"] for row in rows]
    smooth = np.convolve(ours, np.ones(50) / 50, "valid")
    heldout = [(row["step"], row["heldout_loss"]) for row in rows if row.get("heldout_loss") is not None]
    figure, (whole, begin) = plt.subplots(1, 2, figsize=(11, 4.2))
    whole.plot(np.arange(len(smooth)) + 50, smooth, label="training, mean of 50 steps", linewidth=1)
    whole.plot(*zip(*heldout), ".-", label="held-out receipts", linewidth=1, markersize=4)
    begin.plot(ours[: len(theirs)], label="athanor", linewidth=1)
    begin.plot(theirs, label="transformers", linewidth=1)
    for axes, title in ((whole, "athanor run receipts"), (begin, "the same bins in transformers")):
        axes.set(xlabel="step", ylabel="loss", yscale="log", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(out / "curves.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("metrics", "answers", "losses", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    draw_answers(args.answers, args.out)
    draw_curves(args.metrics, json.loads(args.losses.read_text())["losses"], args.out)


if __name__ == "__main__":
    main()
