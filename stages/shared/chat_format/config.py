"""The settings of the loss mask, of boxes in texts, and of the frames of videos."""

from typing import Any, Literal

from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, model_serializer, model_validator

from dataset_builders.contracts.boxes import Convention
from dataset_builders.contracts.strict import EVERY_FIELD, StrictModel


class Learn(StrictModel):
    """The tokens that are trained on. A recipe may give only `answers`: `learn: last`."""

    answers: Literal["all", "last"] = Field(
        default="all", description="which answers are trained on; an answer with is_learnt: false never is"
    )
    reasoning: bool = Field(
        default=True,
        description="true: reasoning in the data is trained on before its answer, if the model's chat template writes "
        "it; false: it is left out, and the answers are trained on as answers without reasoning",
    )

    @model_validator(mode="before")
    @classmethod
    def _answers_alone(cls, value: Any) -> Any:
        return {"answers": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def dumped(self, whole: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        """Write only `answers` if `reasoning` is at its default, so that artifacts from before it are found."""
        return self.answers if self.reasoning and info.context != EVERY_FIELD else whole(self)


LEARN_ALL = Learn()


class BoxFormat(StrictModel):
    """The settings of boxes in texts."""

    convention: Convention = Field(
        default="relative_1000",
        description="coordinates: relative_1000, 0 to 1000 along each side (Qwen3-VL and later); resized_pixels, "
        "pixels of the resized image (Qwen2.5-VL)",
    )
    form: Literal["bbox_2d", "fenced", "lines"] = Field(
        default="bbox_2d",
        description='lists of boxes: bbox_2d, [{"bbox_2d": [x1, y1, x2, y2], "label": ".."}]; fenced, the same in a '
        "block of code; lines, label: [x1, y1, x2, y2]",
    )
    order: Literal["given", "sorted"] = Field(
        default="given", description="boxes of a list: given, as in the data; sorted, by label, then y1, x1, y2, x2"
    )


class VideoFormat(StrictModel):
    """The settings of the frames of videos; null: the model's own, from its video_preprocessor_config.json."""

    fps: float | None = Field(default=None, gt=0, le=1000, description="frames a second that the model reads")
    min_frames: int | None = Field(default=None, gt=0, le=10**6, description="frames of a short video, if it has them")
    max_frames: int | None = Field(default=None, gt=0, le=10**6, description="frames of a long video")
    min_pixels: int | None = Field(
        default=None, gt=0, le=10**12, description="videos with fewer pixels, over all their frames, are scaled up"
    )
    max_pixels: int | None = Field(
        default=None, gt=0, le=10**12, description="videos with more pixels, over all their frames, are scaled down"
    )
    cap_pixels_per_frame: bool | None = Field(
        default=None,
        description="true: a frame also has at most 768 tokens, as with qwen-vl-utils; false: as transformers 5.23 "
        "does by itself",
    )
