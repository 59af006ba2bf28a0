"""The base of every config: frozen, and an unknown key is an error."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Base of every config model in the project."""

    model_config = ConfigDict(frozen=True, extra="forbid")
