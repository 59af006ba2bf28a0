"""The share that multi-token prediction takes of a training step: CPU seconds of one model, FLOPs of published sizes.

    python -m tests.bench.bench_mtp [--steps N]

The model trains forward and backward on a CPU with one thread, in float32, on one bin of text and images, with and
without multi-token prediction in turns. FLOPs are those of `athanor plan` for a mean bin of the bench's mix.
"""

import argparse
import dataclasses
import statistics
import time

import torch

from stages.inputs.config import EmbeddedModelConfig
from tests.bench.host import describe
from tests.helpers import tiny_hybrid_model
from tests.helpers.bins import Kind, make_samples
from tests.helpers.run_dir import OPTIM
from tests.helpers.single_rank import build_tiny, single_rank
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.data.geometry import geometry_of
from trainer.data.micro_batch import make_micro_batch
from trainer.families.qwen3_5_vl.variants import VARIANTS
from trainer.model.mtp import MultiTokenPrediction
from trainer.model.shape import ModelShape, Work
from trainer.objectives.sft import loss_of
from trainer.plan.pieces import language_flops, vision_flops

SEQ_LEN = 1024
KINDS = [Kind(180, ((1, 16, 16),), learnt=0.3)] * 4
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]},
}
# Of a mean bin of the mix in tests/bench/results/train_step_h200_2026-11-22.md.
MIX = Work(16_384, 1_117, 16_384 * 748, 50_640, 50_640 * 2_121)


def of_training(factor: float) -> TrainConfig:
    sizes = {"seed": 0, "num_steps": 9, "global_batch_size": 1, "precision": "float32", "heldout_interval": 9}
    return TrainConfig(**sizes, optim=OPTIM, mtp_loss_scaling_factor=factor)


def share_of_flops(shape: ModelShape, work: Work) -> float:
    """Return the share of a bin's FLOPs, forward and backward, of a shape with multi-token prediction."""
    alone = dataclasses.replace(shape, language=dataclasses.replace(shape.language, mtp=None))
    costs = [
        language_flops(sizes, ParallelConfig(), work, (), (range(sizes.language.num_layers),))[0]
        + vision_flops(sizes, ParallelConfig(), work, ())
        for sizes in (alone, shape)
    ]
    return 1 - costs[0] / costs[1]


def seconds_of(model: torch.nn.Module, batch: object, factor: float) -> float:
    """Return the CPU seconds of one forward and backward pass."""
    model.zero_grad()
    started = time.process_time()
    total, count, _ = loss_of(model(batch), num_loss_tokens=len(batch.labels), mtp_factor=factor)
    (total / count).backward()
    return time.process_time() - started


def measure(steps: int) -> None:
    tiny_hybrid_model.SHAPES["bench"] = (SIZES, {}, True)
    torch.set_num_threads(1)
    with single_rank() as mesh:
        kinds = {}
        for factor in (0.0, 0.1):
            model = build_tiny(tiny_hybrid_model.mtp_hf_dir("bench"), mesh, SEQ_LEN, train=of_training(factor))
            geometry = geometry_of(model.shape)
            batch = make_micro_batch(make_samples(KINDS, geometry, range(20, 8000)), geometry, SEQ_LEN)
            kinds[factor] = (model, batch, [])
        for step in range(steps + 1):
            for factor, (model, batch, seconds) in kinds.items():
                spent = seconds_of(model, batch, factor)
                seconds += [spent] if step else []
    without, whole = (statistics.median(seconds) for _, _, seconds in kinds.values())
    model, batch, _ = kinds[0.1]
    squares = [sum(n * n for n in sizes) for sizes in (batch.sample_lengths, batch.image_patches)]
    work = Work(batch.num_tokens, batch.num_loss_tokens, squares[0], sum(batch.image_patches), squares[1])
    print(f"{batch.num_tokens} tokens, {batch.num_loss_tokens} with loss; {steps} steps in turns, medians")
    print(f"without {without:.3f} s, with {whole:.3f} s: {1 - without / whole:.1%} of the step's CPU seconds")
    print(f"predicted by FLOPs: {share_of_flops(model.shape, work):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9)
    arguments = parser.parse_args()
    print(*describe(), sep=" | ")
    measure(arguments.steps)
    print("\n| published size | parameters | share of a step's FLOPs |\n| --- | ---: | ---: |")
    for name in VARIANTS:
        shape = EmbeddedModelConfig(family="qwen3_5", seed=0, **VARIANTS[name]).shape
        attention = next(layer for layer in shape.language.layers if not layer.mixer.in_chunks)
        language = dataclasses.replace(shape.language, mtp=MultiTokenPrediction(attention))
        shape = dataclasses.replace(shape, language=language)
        print(f"| {name} | {language.mtp.parameters / 1e6:,.1f} M | {share_of_flops(shape, MIX):.1%} |")


if __name__ == "__main__":
    main()
