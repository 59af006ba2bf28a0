"""The base of every config model."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializationInfo, SerializerFunctionWrapHandler, model_serializer

# The context of a dump for people, such as the form's, which also has the fields that a fingerprint omits.
EVERY_FIELD = {"every_field": True}


class StrictModel(BaseModel):
    """The base of every config model: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Names of fields that were added after configs had been fingerprinted. A dump omits them at their defaults, so that
    # older fingerprints stay valid.
    later_fields: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def dumped(self, whole: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        fields = whole(self)
        if info.context != EVERY_FIELD:
            for name in self.later_fields:
                default = type(self).model_fields[name].get_default(call_default_factory=True)
                if name in fields and getattr(self, name) == default:
                    del fields[name]
        return fields
