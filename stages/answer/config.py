"""The config of answer: the number of questions, the library that generates, and the batch size."""

from typing import Literal

from pydantic import Field

from dataset_builders.contracts.strict import StrictModel

EngineName = Literal["transformers", "vllm"]


class AnswerConfig(StrictModel):
    """Identity: the questions and their batches, since in bfloat16 the batch affects an answer's last bits."""

    max_new_tokens: int = Field(gt=0, le=32768, description="an answer is cut there and counts as not stopped")
    max_samples_per_subset: int | None = Field(
        default=None,
        gt=0,
        le=10**9,
        description="maximal number of held-out samples of each subset, drawn, always the same ones; null: all",
    )
    engine: EngineName = Field(
        default="transformers", description="library that generates; vllm: here or by ATHANOR_VLLM_PYTHON"
    )
    batch_size: int = Field(default=128, gt=0, le=10**4, description="answers generated side by side, at most")
    batch_tokens: int = Field(
        default=131072,
        gt=0,
        le=2**26,
        description="tokens of prompts and answers side by side, padding included, at most",
    )
    part_size: int = Field(
        default=256,
        gt=0,
        le=10**6,
        description="answers that are written together: a killed run loses one such part at most",
    )
