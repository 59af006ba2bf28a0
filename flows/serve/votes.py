"""The votes of people who saw the answers of one or two models: a file of JSON lines, and the images beside it.

    votes.jsonl                  {"time", "question", "images", "answers": [{"model", "text"}, ...], "vote", "blind"}
    votes-images/<sha256>.png    each image once

A vote is one write at the end of the file under a lock, so that no vote is lost when several people, or several
servers, write at a time.
"""

import fcntl
import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import image_size
from dataset_builders.storage.files import atomic_path
from flows.serve.api_error import ApiError, field_error, of_validation
from flows.serve.chat_request import MOST_IMAGES, decode_image

BOTH, NEITHER = "both", "neither"
_LONGEST = 200_000  # characters
_SUFFIXES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"RIFF": "webp", b"GIF8": "gif"}

Text = Annotated[str, Field(max_length=_LONGEST)]


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    text: Text


class _Vote(BaseModel):
    """A vote for one of the answers, for both or for neither. `blind`: the names were hidden until the vote."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: Text
    images: Annotated[list[str], Field(max_length=MOST_IMAGES)]
    answers: Annotated[list[_Answer], Field(min_length=1, max_length=2)]
    vote: str
    blind: bool

    @model_validator(mode="after")
    def _is_possible(self) -> "_Vote":
        possible = [*(answer.model for answer in self.answers), NEITHER, *([BOTH] if len(self.answers) > 1 else [])]
        if self.vote not in possible:
            raise ValueError(f"vote is {self.vote[:60]!r}; it is one of {', '.join(possible)}")
        return self


class Votes:
    """The file of votes.

    Args:
        path: a file that exists or can be made.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab"):
                pass
        except OSError as error:
            raise InputError(f"--votes {path} cannot be written ({error.strerror}); choose another file") from error

    def add(self, values: Any) -> None:
        """Append a vote; on return it is on the disk.

        Args:
            values: the JSON object of a request, with the images as `data:` URLs.

        Raises:
            ApiError: a field is wrong, or the vote cannot be written.
        """
        try:
            vote = _Vote.model_validate(values)
        except ValidationError as error:
            raise of_validation(error) from error
        try:
            self._store(vote)
        except OSError as error:
            raise ApiError(
                507, f"the vote was not stored: {self.path}: {error.strerror}; mend that and vote again"
            ) from error

    def _store(self, vote: _Vote) -> None:
        names = [self._keep(f"images[{place}]", url) for place, url in enumerate(vote.images)]
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, **vote.model_dump(), "images": names}) + "\n"
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                file.write(b"\n")  # a killed server left half a line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def _keep(self, field: str, url: str) -> str:
        """Store an image and return its path, relative to the file of votes."""
        data = decode_image(field, url)
        try:
            image_size(data)
        except SkipSample as error:
            raise field_error(field, f"the image cannot be used ({error})") from error
        suffix = next((suffix for head, suffix in _SUFFIXES.items() if data.startswith(head)), "image")
        path = self.path.with_name(f"{self.path.stem}-images") / f"{hashlib.sha256(data).hexdigest()}.{suffix}"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with atomic_path(path) as unfinished:
                unfinished.write_bytes(data)
        return f"{path.parent.name}/{path.name}"
