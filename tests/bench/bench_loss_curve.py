"""The loss of some hundred steps on the same bins: this trainer in bfloat16, also with moments in bfloat16, and in
float8; transformers in bfloat16.

    python -m tests.bench.bench_loss_curve --model qwen3_vl_2b --steps 200 --out curves.json --only bfloat16
    python -m tests.bench.bench_loss_curve --model qwen3_vl_2b --steps 200 --out curves.json --only transformers
    python -m tests.bench.bench_loss_curve --out curves.json --plot curves.png        # draws and prints, on any machine

One GPU. Random weights (seed 0), the mix of bench_train_step with text from 256 token ids, so that
there is something to learn; bins in the trainer's own order. transformers: float32 weights under bf16 autocast, sdpa
without cuDNN, four samples of like length padded to the longest, torch's AdamW, loss over the loss tokens of the bin,
gradients clipped alike. Where the model has a gated delta rule, flash-linear-attention should not be installed: its
gradients are wrong on some GPUs, and transformers' own rule is what this trainer is to be held against.
"""

import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from dataset_builders.contracts.tokenized import PatchFormat, TokenizedSample
from tests.bench.command import bench_folder, make_parser, table_head, table_row
from tests.bench.host import describe
from tests.bench.mix import write_data, write_model
from tests.bench.peer import IGNORE_INDEX, collate
from tests.bench.trainer_job import train_steps
from trainer.contract.run import OptimConfig, TrainConfig
from trainer.data.micro_batch import geometry_of
from trainer.data.order import TrainingOrder
from trainer.data.reader import BinReader
from trainer.data.slices import RankSlice
from trainer.loop.optim import learning_rate
from trainer.model.registry import read_model

SHORT_MOMENTS = "bfloat16 moments"
OURS = ("bfloat16", "float8", SHORT_MOMENTS)
PEER = "transformers"
SEQ_LEN = 8192
PEER_SAMPLES = 4  # samples of a micro batch
READERS = 4  # threads that read samples for transformers


def train_config(steps: int, name: str) -> TrainConfig:
    """Return the settings, which differ only in the property that the curve is named after."""
    precision, moments = (name, "float32") if name != SHORT_MOMENTS else ("bfloat16", "bfloat16")
    optim = OptimConfig(lr=1e-5, min_lr_fraction=0.1, warmup_steps=20, weight_decay=0.1, moments=moments)
    return TrainConfig(
        seed=0, num_steps=steps, global_batch_size=1, precision=precision, heldout_interval=10**6, optim=optim
    )


def curve_of_ours(root: Path, steps: int, name: str) -> list[float]:
    return [row.loss for row in train_steps(root, train_config(steps, name), SEQ_LEN, steps)]


def curve_of_transformers(root: Path, steps: int) -> Iterator[float]:
    """Yield the losses of transformers on the same bins."""
    reader = bin_reader(root / "data", root / "bins", root / "hf", SEQ_LEN)
    yield from train_transformers(load_transformers(root / "hf"), reader, train_config(steps, "bfloat16"))


def bin_reader(tokenized: Path, bins: Path, hf_dir: Path, seq_len: int) -> BinReader:
    geometry = geometry_of(read_model(hf_dir)[1])
    return BinReader(tokenized, bins, "train", geometry, seq_len, RankSlice(pad_multiple=4))


def load_transformers(hf_dir: Path) -> torch.nn.Module:
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    model = AutoModelForImageTextToText.from_pretrained(hf_dir, dtype=torch.float32).train()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def train_transformers(model: torch.nn.Module, reader: BinReader, config: TrainConfig) -> Iterator[float]:
    """Train on the bins in the trainer's own order, and yield the loss of each step."""
    optim = config.optim
    weights, rest = ([p for p in model.parameters() if (p.ndim > 1) is is_weight] for is_weight in (True, False))
    groups = [{"params": weights, "weight_decay": optim.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=(optim.adam_beta1, optim.adam_beta2), eps=optim.adam_eps, fused=True)
    order = TrainingOrder(reader, seed=config.seed, global_batch_size=config.global_batch_size, dp_rank=0, dp=1)

    def samples(step: int) -> list[TokenizedSample]:
        return [sample for number in order.global_batch(step) for sample in reader.samples(number)]

    with ThreadPoolExecutor(max_workers=READERS) as pool:
        ahead = deque(pool.submit(samples, step) for step in range(min(READERS, config.num_steps)))
        for step in range(config.num_steps):
            for group in adam.param_groups:
                group["lr"] = learning_rate(step, optim, config.num_steps)
            batch = ahead.popleft().result()
            if step + READERS < config.num_steps:
                ahead.append(pool.submit(samples, step + READERS))
            yield _step(model, adam, batch, optim.clip_grad_norm, reader.patch_format)


def _step(model, adam, samples, clip: float, pixels: PatchFormat) -> float:
    count = sum(int(sample.loss_mask[1:].sum()) for sample in samples)
    total = torch.zeros((), device=model.device)
    by_length = sorted(samples, key=lambda sample: len(sample.input_ids))
    for first in range(0, len(by_length), PEER_SAMPLES):
        batch = collate(by_length[first : first + PEER_SAMPLES], model.config, torch.float32, pixels)
        inputs = {name: value.to(model.device) for name, value in batch.inputs.items()}
        labels = inputs.pop("labels")[:, 1:]
        learnt = labels != IGNORE_INDEX
        with torch.autocast(model.device.type, torch.bfloat16):
            hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1][learnt]
            logits = model.lm_head(hidden)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[learnt], reduction="sum") / count
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    adam.step()
    adam.zero_grad(set_to_none=True)
    return float(total)


def table(curves: dict[str, list[float]]) -> str:
    """Return the mean loss over windows of the common steps, and the distance of each curve from this trainer's
    bfloat16."""
    curves = {name: curve[: min(map(len, curves.values()))] for name, curve in curves.items()}
    base = np.array(curves["bfloat16"])
    windows = [slice(i, i + len(base) // 8) for i in range(0, len(base), len(base) // 8)]
    lines = [table_head(["steps"], [*curves, *(f"{name} - bfloat16" for name in curves if name != "bfloat16")])]
    for window in windows:
        means = {name: np.mean(np.array(curve)[window]) for name, curve in curves.items()}
        apart = [f"{np.mean(np.array(c)[window] - base[window]):+.4f}" for n, c in curves.items() if n != "bfloat16"]
        shown = [f"{mean:.4f}" for mean in means.values()]
        lines.append(table_row([f"{window.start + 1} to {min(window.stop, len(base))}", *shown, *apart]))
    return "\n".join(lines)


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Plot the losses above, and the differences from this trainer's bfloat16 below."""
    plt.switch_backend("Agg")
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(2, 1))
    for name, curve in curves.items():
        base = np.array(curves["bfloat16"])[: len(curve)]
        steps = np.arange(1, len(curve) + 1)
        above.plot(steps, curve, label=name if name == PEER else f"athanor, {name}", linewidth=1)
        if name != "bfloat16":
            below.plot(steps, np.array(curve) - base, label=f"{name} minus athanor, bfloat16", linewidth=1)
    above.set_ylabel("loss")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    below.axhline(0, color="gray", linewidth=0.5)
    above.legend()
    below.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="qwen3_vl_2b")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bins", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True, help="JSON of the curves; those in it are kept")
    parser.add_argument("--only", choices=[*OURS, PEER], action="append", default=[])
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    curves = json.loads(args.out.read_text()) if args.out.is_file() else {}
    with bench_folder() as root:
        if args.only:
            torch.manual_seed(0)
            write_model(root / "hf", args.model)
            write_data(root, args.bins, SEQ_LEN, range(1000, 1256), model=args.model)
        for name in args.only:
            curves[name] = []
            for loss in (
                curve_of_transformers(root, args.steps) if name == PEER else curve_of_ours(root, args.steps, name)
            ):
                curves[name].append(loss)  # an interrupted run keeps its results so far
                args.out.write_text(json.dumps(curves))
    if "bfloat16" in curves:
        print(", ".join(describe()), "\n")
        print(table(curves))
        if args.plot:
            plot(curves, args.plot)


if __name__ == "__main__":
    main()
