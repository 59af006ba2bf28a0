"""The base of every config model."""

from pydantic import BaseModel, ConfigDict

# Serialization context for people (the form, for example): includes the fields that a fingerprint omits at defaults.
EVERY_FIELD = {"every_field": True}


class StrictModel(BaseModel):
    """The base of every config model: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
