"""The config of verify: the number of questions that are asked again."""

from pydantic import Field

from dataset_builders.contracts.strict import StrictModel


class VerifyConfig(StrictModel):
    """Identity: the held-out questions that are asked again, and the compared length of each answer."""

    num_questions: int = Field(
        default=16, ge=1, le=10_000, description="held-out questions that the exported model answers again"
    )
    max_new_tokens: int = Field(
        default=64, ge=1, le=32768, description="tokens of each answer that are compared, from its beginning"
    )
