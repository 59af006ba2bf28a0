"""The search for settings that fit a training into the memory of one GPU, by the estimate of `athanor plan`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataset_builders.errors import InputError
from trainer.contract.parallel import ParallelConfig
from trainer.contract.run import TrainConfig
from trainer.model.adapters import adapter_sizes
from trainer.model.family import Family
from trainer.model.shape import ModelShape
from trainer.plan.estimate import estimate_memory

PATCHES = 4  # patches of one image token
# Share of a GPU's memory that a training may take. The rest is for CUDA itself and for the error of the estimate.
USABLE = 0.92
ROOMY = 4096
_BINS = (8192, 6144, 4096, 3072, 2048)  # tokens; larger bins train faster and come first
_LORA: Mapping[str, Any] = {"rank": 16, "alpha": 32}
_RECOMPUTE: Mapping[str, Any] = {"recompute": "full", "recompute_vision": True}
# Learning rates for full fine-tuning are those of Qwen's own recipes (QwenLM/Qwen3-VL, qwen-vl-finetune). Adapters take
# ten times that (Schulman et al. 2025, "LoRA Without Regret").
FULL_RATES = {"lr": "1.0e-5", "vision": "2.0e-6"}
LORA_RATE = "1.0e-4"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Settings of a training that fit a GPU.

    Attributes:
        adapter: value of `train.adapter`; None trains the whole model.
        parallel: fields of `execution.parallel` that differ from their defaults.
        seq_len: tokens of a bin.
        memory: estimated bytes.
        words: a description of the choice for the user.
    """

    adapter: Mapping[str, Any] | None
    parallel: Mapping[str, Any]
    seq_len: int
    memory: int
    words: str

    @property
    def is_plain(self) -> bool:
        """Whether no activation is recomputed, and no weight is stored in float8."""
        return not self.parallel and (self.adapter is None or "base" not in self.adapter)


def fit_model(family: Family, shape: ModelShape, memory: float, longest: int) -> Fit | None:
    """Return the first settings that fit, from training the whole model down to LoRA on a recomputed float8 base.

    Bins of fewer than ROOMY tokens are tried last, because packing fills them badly.

    Args:
        memory: bytes that the training may take.
        longest: tokens of the longest sample, which a bin must hold.

    Returns:
        None if no settings fit.
    """
    sizes = bin_sizes(longest)
    roomy = [size for size in sizes if size >= ROOMY]
    for some in (roomy, [size for size in sizes if size < ROOMY]):
        for adapter, parallel, words in _choices(shape):
            for seq_len in some:
                size = estimate(family, shape, adapter, parallel, seq_len)
                if size <= memory:
                    return Fit(adapter=adapter, parallel=parallel, seq_len=seq_len, memory=size, words=words)
    return None


def fit_sizes(family: Family, shape: ModelShape, seq_len: int) -> list[tuple[str, int]]:
    """Return (settings in words, bytes on one GPU) for each choice of settings, with bins of `seq_len` tokens."""
    return [
        (words, estimate(family, shape, adapter, parallel, seq_len)) for adapter, parallel, words in _choices(shape)
    ]


def smallest(family: Family, shape: ModelShape, longest: int) -> int:
    """Return the bytes of the settings that take the least memory."""
    return min(estimate(family, shape, a, p, bin_sizes(longest)[-1]) for a, p, _ in _choices(shape))


def bin_sizes(longest: int) -> Sequence[int]:
    """Return the possible bin sizes in tokens, the larger first. Each can hold the longest sample."""
    return [size for size in _BINS if size >= longest] or [-(-longest // 1024) * 1024]


def estimate(
    family: Family, shape: ModelShape, adapter: Mapping[str, Any] | None, parallel: Mapping[str, Any], seq_len: int
) -> int:
    """Return the bytes that a training in bfloat16 takes on one GPU, as `athanor plan` prints them."""
    train = TrainConfig.model_validate(
        {
            "seed": 0,
            "num_steps": 1,
            "global_batch_size": 1,
            "precision": "bfloat16",
            "heldout_interval": 1,
            "optim": {"lr": 1e-5, "min_lr_fraction": 0, "warmup_steps": 0, "weight_decay": 0},
            "adapter": adapter,
        }
    )
    sizes = {"dp": 1, "seq_len": seq_len, "max_patches": PATCHES * seq_len}
    layout, pieces = ParallelConfig.model_validate(parallel), [range(shape.language.num_layers)]
    return sum(
        estimate_memory(
            shape, layout, train, pieces=pieces, adapters=adapter_sizes(train, family, shape), **sizes
        ).values()
    )


def check_memory(gigabytes: float) -> float:
    """Return the bytes that a training may take of a GPU with this memory.

    Raises:
        InputError: `gigabytes` is not a possible memory of a GPU.
    """
    if not 1 <= gigabytes <= 10_000:
        raise InputError(f"--gpu-memory {gigabytes:g} is no memory of a GPU in GB; give 24 for a GPU of 24 GB")
    return USABLE * gigabytes * 1e9


def _choices(shape: ModelShape) -> Iterator[tuple[Mapping[str, Any] | None, Mapping[str, Any], str]]:
    """Yield (adapter, layout, words), the choices that are nearest to plain full training first."""
    recompute = dict(_RECOMPUTE) if shape.vision else {"recompute": "full"}
    small = {**_LORA, "base": "float8"}
    yield None, {}, "the whole model"
    yield None, recompute, "the whole model, its layers computed again in backward"
    yield _LORA, {}, "LoRA of rank 16"
    yield small, {}, "LoRA of rank 16 beside a base in float8"
    yield _LORA, recompute, "LoRA of rank 16, layers computed again in backward"
    yield small, recompute, "LoRA of rank 16 beside a base in float8, layers computed again in backward"
