"""Low-rank adapters: what is trained beside a frozen model."""

import re
from typing import Literal

from pydantic import Field, field_validator

from dataset_builders.contracts.strict import StrictModel

ROLES = ("attention", "mlp", "delta", "merger", "vision")


class AdapterConfig(StrictModel):
    """LoRA (Hu et al. 2021, arXiv:2106.09685) or DoRA (Liu et al. 2024, arXiv:2402.09353) beside a frozen model."""

    kind: Literal["lora", "dora"] = Field(
        default="lora", description="dora: also the length of each row of an adapted weight"
    )
    rank: int = Field(ge=1, le=4096, description="numbers between the two products of an adapter")
    alpha: float = Field(gt=0, le=1e6, description="adapters count alpha / rank")
    rslora: bool = Field(default=False, description="adapters count alpha / sqrt(rank)")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="of an adapter's input, in training")
    targets: tuple[str, ...] = Field(
        default=("attention", "mlp", "delta"),
        min_length=1,
        description="adapted layers: roles (attention, mlp, delta, merger, vision), or regular expressions over whole "
        "Hugging Face names of modules",
    )

    @field_validator("targets")
    @classmethod
    def _compile(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for target in targets:
            try:
                re.compile(target)
            except re.error as error:
                raise ValueError(f"{target!r} is no regular expression: {error}") from None
        return targets

    @property
    def scaling(self) -> float:
        """What the product of an adapter counts."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
