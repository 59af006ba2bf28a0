"""The settings of the loss mask."""

from typing import Any, Literal

from pydantic import Field, SerializationInfo, SerializerFunctionWrapHandler, model_serializer, model_validator

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
