"""The base of every config model."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """The base of every config model: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
