"""The bound of `stages.verify.verdict` beside the differences that rounding to bfloat16 makes.

    python -m tests.bench.bench_rounding [HF_DIR ...]

Each model reads 12 prompts twice, with weights that bfloat16 holds: in float32 and in bfloat16. The difference of two
logits moves by some amount, which is divided by u * sqrt(_ROUNDINGS * layers) * spread of the bound. Two programs that
both compute in bfloat16 differ by some sqrt(2) of it. Without arguments: the tiny models of the tests.
"""

import math
import sys
from pathlib import Path

import torch
import transformers

from dataset_builders.contracts.sample import Message
from stages.answer.greedy_decoder import Row
from stages.answer.transformers_engine import Generator
from stages.shared.inputs.model_directory import ModelDirectory
from stages.verify import verdict
from tests.helpers.evaluation import picture, talkative_hf_dir
from tests.helpers.tiny_experts_model import experts_hf_dir
from tests.helpers.tiny_hybrid_model import hybrid_hf_dir, talkative_hybrid_dir
from tests.helpers.tiny_model import tiny_hf_dir
from trainer.model.registry import read_model

PROMPTS = 12
TINY = {
    "qwen3_vl": lambda: tiny_hf_dir("deep"),
    "qwen3_vl, large weights": talkative_hf_dir,
    "qwen3_5": lambda: hybrid_hf_dir("deep"),
    "qwen3_5, large weights": talkative_hybrid_dir,
    "qwen3_vl_moe": lambda: experts_hf_dir("listed"),
    "qwen3_5_moe": lambda: experts_hf_dir("shared"),
}


@torch.inference_mode()
def moved(hf_dir: Path) -> torch.Tensor:
    """Return by how much the lead of each prompt's best token over every other token moves, in units of the bound."""
    generator = Generator(ModelDirectory(hf_dir))
    model, decoder = generator.decoder.model.bfloat16(), generator.decoder
    layers, shares = read_model(hf_dir)[1].language.num_layers, []
    for seed in range(PROMPTS):
        images = generator.encode_images([picture(seed, 64 + 16 * (seed % 4), 48 + 16 * (seed % 3))])
        question = Message(role="user", text=f"<image>Which digit is in the picture? {seed}")
        padded = decoder.pad([generator.encode_prompt([question], images)], [Row(0, 1)])
        logits = []
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype)
            seen: list[torch.Tensor] = []
            hook = model.lm_head.register_forward_hook(lambda _module, _inputs, out, seen=seen: seen.append(out))
            decoder.read(padded, transformers.DynamicCache(config=model.config.get_text_config()))
            hook.remove()
            logits.append(seen[0][0, -1].float())
        exact, rounded = logits
        best = int(exact.argmax())
        unit = verdict.UNIT_ROUNDOFF["bfloat16"] * math.sqrt(verdict._ROUNDINGS * layers) * float(exact.std())
        shares.append(((rounded - rounded[best]) - (exact - exact[best])).abs() / unit)
    return torch.cat(shares)


def main(directories: list[str]) -> None:
    print(f"{'model':30}  median  99.9 %  largest  (the bound is {verdict._SAFETY:g})")
    models = {name: (lambda name=name: Path(name)) for name in directories} or TINY
    for name, directory in models.items():
        shares = moved(directory())
        values = [float(shares.quantile(q)) for q in (0.5, 0.999, 1.0)]
        print(f"{name[-30:]:30}  " + "  ".join(f"{value:6.2f}" for value in values))


if __name__ == "__main__":
    main(sys.argv[1:])
