"""The base of every config model."""

from pydantic import BaseModel, ConfigDict

# The context of a dump for people, as the form's: also the fields that a fingerprint leaves out at their defaults.
EVERY_FIELD = {"every_field": True}


class StrictModel(BaseModel):
    """The base of every config model: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
