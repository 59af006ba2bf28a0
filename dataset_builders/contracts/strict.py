"""The base of every config model."""

from pydantic import BaseModel, ConfigDict

EVERY_FIELD = {"every_field": True}  # the context of a dump for people, as the form's: with fields that came later


class StrictModel(BaseModel):
    """The base of every config model: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
