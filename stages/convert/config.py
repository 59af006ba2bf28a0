"""The config of convert: which rows are read, left out and held out."""

import re
from typing import Any, Literal

from pydantic import (
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.errors import plain_message, shown
from dataset_builders.pictures.images import PILLOW_PIXEL_LIMIT
from dataset_builders.sources.registry import get_builder

RAW = "raw"  # role of a single raw input
_SUBSET = re.compile(r"[A-Za-z0-9_-]{1,100}")


class SourceReading(StrictModel):
    """The builder, subsets and options that read one source."""

    later_fields = ("heldout_files",)

    builder: str | None = Field(
        default=None,
        description="which dataset's rows these are, a name of docs/data-formats.md; null where `data` "
        "lists several sources, each with its own",
    )
    subsets: tuple[str, ...] = Field(
        default=(), max_length=10_000, description="names of the subsets to read; none means all that the source holds"
    )
    options: dict[str, Any] = Field(default={}, description="the builder's own settings; see its file")
    heldout_files: tuple[str, ...] | None = Field(
        default=None,
        max_length=10_000,
        description="globs of files, relative to the source, whose rows are held out while all others are trained on; "
        "[]: by heldout_fraction, or as the builder's options say; null: the same, but files that are named test, val "
        "or the like beside others are refused",
    )

    @field_validator("subsets")
    @classmethod
    def _are_names(cls, subsets: tuple[str, ...]) -> tuple[str, ...]:
        for name in subsets:
            if not _SUBSET.fullmatch(name):
                raise ValueError(f"{shown(name)} is no name of a subset; it has letters, digits, _ and - alone")
        return subsets

    @model_validator(mode="after")
    def _options_fit(self) -> "SourceReading":
        """Check the options against the builder's model and fill in its defaults."""
        if self.builder is None:
            if self.options or self.subsets or self.heldout_files:
                raise ValueError("subsets, options and heldout_files belong to a builder, and builder is null")
            return self
        model = get_builder(self.builder).options
        try:
            whole = model.model_validate(self.options).model_dump(mode="json")
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(["options", *map(str, first["loc"])])
            known = ", ".join(model.model_fields) or "none"
            message = plain_message(first["type"], first["msg"])
            gap = ": " if first["type"] == "value_error" else " "
            raise ValueError(f"{field} of builder {self.builder}{gap}{message}; its options: {known}") from error
        object.__setattr__(self, "options", whole)  # the model is frozen, and the fingerprint needs the defaults too
        return self


class ConvertConfig(SourceReading):
    """Identity of the sample shards, in addition to the raw rows."""

    later_fields = ("max_rows", *SourceReading.later_fields)

    max_rows: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="read only this many rows of the source, always the same ones; more rows add to them; null: all",
    )
    heldout_fraction: float = Field(ge=0, lt=1, description="share of pictures (with all their samples) held out")
    min_heldout: int = Field(
        default=10,
        ge=0,
        le=10**9,
        description="least number of samples held out; small data holds out more than the share to reach it",
    )
    seed: int = Field(ge=0, le=2**32 - 1, description="decides which pictures are held out")
    max_image_pixels: int = Field(
        gt=0, le=PILLOW_PIXEL_LIMIT, description="an image, or a video whose frames have more pixels, is left out"
    )
    min_image_side: int = Field(
        ge=1, le=10**5, description="an image or video with a shorter side, in pixels, is left out"
    )
    max_video_frames: int = Field(
        default=54_000,
        ge=1,
        le=10**6,
        description="a video with more frames between its start and its end is left out; 54,000 are half an hour of 30 "
        "a second",
    )
    decode_check: Literal["full", "header"] = Field(
        default="full",
        description="full: every image and frame is decoded to its end; header: only headers are read, some five times "
        "faster; damage after the header is then found by tokenization, which leaves the sample out",
    )
    shard_size_mb: float = Field(
        gt=0, le=4096, description="a shard is closed before it grows over this, in 10^6 bytes"
    )
    max_skip_fraction: float = Field(
        ge=0,
        le=1,
        description="if a larger share is left out, exact duplicates aside, and at least 3, the stage fails",
    )

    @property
    def readings(self) -> dict[str, SourceReading]:
        """Role of each raw input -> its reading."""
        return {RAW: self}


class MixedConvertConfig(ConvertConfig):
    """Identity of the sample shards of several sources; each source's name is the prefix of its subsets' names."""

    sources: dict[str, SourceReading] = Field(description="name of a source -> how it is read")

    @property
    def readings(self) -> dict[str, SourceReading]:
        """Role of each raw input -> its reading."""
        return {raw_role(name): reading for name, reading in self.sources.items()}


def raw_role(name: str) -> str:
    return f"{RAW}-{name}"


def subset_prefix(role: str) -> str:
    """Return the prefix of the names of a raw input's subsets; empty for a single input."""
    return f"{role.removeprefix(f'{RAW}-')}_" if role != RAW else ""
