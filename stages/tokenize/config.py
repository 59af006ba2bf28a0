"""The config of tokenize: lengths, pixels, the form of boxes, frames of videos, and the answers that are trained on."""

from typing import Literal

from pydantic import Field, field_validator

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.contracts.tokenized import Codec
from stages.shared.chat_format.config import LEARN_ALL, BoxFormat, Learn, VideoFormat

OverLength = Literal["skip", "drop_turns"]


class TokenizeConfig(StrictModel):
    """Identity of tokenized samples, in addition to the samples and the processor's files."""

    later_fields = ("boxes", "videos")

    max_seq_len: int = Field(gt=0, le=2**24, description="samples with more tokens are over-long; nothing is ever cut")
    over_length: OverLength = Field(
        default="skip",
        description="over-long samples: skip leaves them out; drop_turns leaves out whole last turns until they fit",
    )
    max_pixels: int | None = Field(
        gt=0, le=10**9, description="larger images are scaled down to this area; null: the model's own"
    )
    min_pixels: int | None = Field(
        default=None, gt=0, le=10**9, description="smaller images are scaled up to this area; null: the model's own"
    )
    codec: Codec = Field(
        default="u8",
        description="how pixels are stored: u8, scaled patches; u8_zstd, the same compressed; original, the image "
        "files, scaled whenever they are read",
    )
    learn: Learn = Field(
        default=LEARN_ALL, description="which answers are trained on, and whether with their reasoning"
    )
    system_prompt: str | None = Field(
        default=None, min_length=1, description="put first if a conversation has no system message; null: nothing"
    )
    boxes: BoxFormat = BoxFormat()
    videos: VideoFormat = VideoFormat()
    max_skip_fraction: float = Field(
        ge=0, le=1, description="if a larger share is left out, and at least 3 samples, the stage fails"
    )

    @field_validator("system_prompt")
    @classmethod
    def _lines_end_alike(cls, value: str | None) -> str | None:
        """Return the prompt with LF line ends, as in samples; Windows and the form's text box write CRLF."""
        return value if value is None else value.replace("\r\n", "\n").replace("\r", "\n")
