"""The settings of low-rank adapters, which are trained in addition to a frozen model."""

import re
from typing import Literal

from pydantic import Field, field_validator

from dataset_builders.contracts.strict import StrictModel

ROLES = ("attention", "mlp", "experts", "delta", "merger", "vision")


class AdapterConfig(StrictModel):
    """LoRA (Hu et al. 2021, arXiv:2106.09685) or DoRA (Liu et al. 2024, arXiv:2402.09353) on a frozen model."""

    kind: Literal["lora", "dora"] = Field(
        default="lora", description="dora: also trains the length of each row of an adapted weight"
    )
    rank: int = Field(ge=1, le=4096, description="width between the two matrices of an adapter")
    alpha: float = Field(gt=0, le=1e6, description="an adapter's output is scaled by alpha / rank")
    rslora: bool = Field(default=False, description="scale by alpha / sqrt(rank) instead")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="dropout on an adapter's input, in training")
    base: Literal["train_precision", "float8"] = Field(
        default="train_precision",
        description="storage of the frozen weights. float8: the language layers' matrices take one byte per number and "
        "are unpacked for each product; activations and products stay in train.precision",
    )
    targets: tuple[str, ...] = Field(
        default=("attention", "mlp", "delta"),
        min_length=1,
        description="adapted layers: roles (attention, mlp, experts, delta, merger, vision), or regular "
        "expressions over whole Hugging Face names of modules",
    )
    modules_to_save: tuple[str, ...] = Field(
        default=(),
        description="modules that are trained whole and saved with the adapters: regular expressions over whole "
        "Hugging Face names of modules",
    )

    @field_validator("targets", "modules_to_save")
    @classmethod
    def _compile(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return patterns

    @property
    def scaling(self) -> float:
        """Factor by which the output of an adapter is scaled."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
