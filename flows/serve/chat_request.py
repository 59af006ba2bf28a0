"""The body of POST /v1/chat/completions: what of OpenAI's API is taken, and what is refused by name.

An image is a `data:` URL. Addresses are refused: a server that fetches them can be made to call others in its network.
A field that would change the answer and is not implemented is refused; a field that changes nothing is ignored.
"""

import base64
import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, ValidationError, model_validator

from dataset_builders.contracts.sample import IMAGE_SLOT, Message, SkipSample
from flows.serve.api_error import ApiError, field_error, of_validation
from stages.chat.conversation import USABLE, UnusableImage, check_text
from stages.chat.piece import AnswerSettings

MOST_MESSAGES = 256
MOST_IMAGES = 16
_DATA_URL = re.compile(r"data:image/[\w.+-]{1,40};base64,")
_SYSTEM = {"developer": "system"}  # OpenAI's newer name


class _Checked(BaseModel):
    """An object without unknown fields. A field that is null counts as absent, since clients send such fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class ImageUrl(_Checked):
    """An image. `detail` has no effect: each image has the pixels of training."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class Part(_Checked):
    """A part of a message: text or an image."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None

    @model_validator(mode="after")
    def _one(self) -> "Part":
        if (self.text is None) != (self.type != "text") or (self.image_url is None) != (self.type != "image_url"):
            raise ValueError(f"a part of type {self.type} has the field {self.type}, and no other")
        return self


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class ChatMessage(_Checked):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], BeforeValidator(_parts), Field(min_length=1)]
    name: str | None = None


class StreamOptions(_Checked):
    """Settings of a streamed answer."""

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class _TextFormat(_Checked):
    type: Literal["text"]


class ChatRequest(_Checked):
    """A request for an answer. `temperature` is 0 if it is not given: scores are of the most probable answers."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_tokens: Annotated[int, Field(gt=0, strict=True)] | None = None
    max_completion_tokens: Annotated[int, Field(gt=0, strict=True)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, strict=True)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63, strict=True)] | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=4)] | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    # Fields of OpenAI's API that are taken at the value at which they change nothing.
    n: Literal[1] = 1
    logprobs: Literal[False] = False
    presence_penalty: Literal[0] = 0
    frequency_penalty: Literal[0] = 0
    response_format: _TextFormat | None = None
    # Fields that never change an answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: StrictBool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _stops(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(values.get("stop"), str):
            return {**values, "stop": [values["stop"]]}
        return values


@dataclass(frozen=True, slots=True)
class Chat:
    """A request that can be asked.

    Attributes:
        messages: in the form of the data, the last one a user's.
        images: encoded image files, in the order of the slots.
        image_urls: their `data:` URLs.
        image_fields: the field of each image, for messages.
        max_tokens: None: as many as the server allows.
    """

    model: str
    messages: tuple[Message, ...]
    images: tuple[bytes, ...]
    image_urls: tuple[str, ...]
    image_fields: tuple[str, ...]
    max_tokens: int | None
    settings: AnswerSettings
    is_streamed: bool
    has_usage: bool


def parse_chat(values: Any, most_tokens: int) -> Chat:
    """Return the request of a JSON value.

    Args:
        most_tokens: the server's limit of an answer's length.

    Raises:
        ApiError: a field is wrong or not supported.
    """
    try:
        request = ChatRequest.model_validate(values)
    except ValidationError as error:
        raise of_validation(error) from error
    for field in ("max_tokens", "max_completion_tokens"):
        if (getattr(request, field) or 0) > most_tokens:
            limit = f"this server generates at most {most_tokens} tokens (athanor serve --max-tokens)"
            raise field_error(field, f"{getattr(request, field)} is too much; {limit}")
    messages, urls = _conversation(request)
    count = request.max_completion_tokens or request.max_tokens
    return Chat(
        model=request.model,
        messages=tuple(messages),
        images=tuple(decode_image(field, url) for field, url in urls.items()),
        image_urls=tuple(urls.values()),
        image_fields=tuple(urls),
        max_tokens=count,
        settings=AnswerSettings(
            max_tokens=count or most_tokens,
            stop=tuple(request.stop or ()),
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
        ),
        is_streamed=request.stream,
        has_usage=bool(request.stream_options and request.stream_options.include_usage),
    )


def _conversation(request: ChatRequest) -> tuple[list[Message], dict[str, str]]:
    """Return the messages, and the URLs of the images by their fields."""
    messages: list[Message] = []
    images: dict[str, str] = {}
    for number, message in enumerate(request.messages):
        role = _SYSTEM.get(message.role, message.role)
        text = ""
        for field, part in _fields(number, message):
            if part.image_url is None:
                text += _checked(field, part.text)
                continue
            if role != "user":
                raise field_error(field, f"images are in user messages only, not in {message.role} messages")
            images[field] = part.image_url.url
            text += IMAGE_SLOT
        if role == "system" and number:
            raise field_error(f"messages[{number}].role", "only the first message may be a system message")
        if role != "assistant" and not text.strip():
            raise field_error(f"messages[{number}].content", "the message is empty")
        messages.append(Message(role=role, text=text))
    if messages[-1].role != "user":
        raise field_error(f"messages[{len(messages) - 1}].role", "the last message must be a user message")
    if len(images) > MOST_IMAGES:
        raise field_error("messages", f"{len(images)} images are too many; at most {MOST_IMAGES} are taken")
    return messages, images


def _fields(number: int, message: ChatMessage) -> Iterator[tuple[str, Part]]:
    for place, part in enumerate(message.content):
        suffix = "image_url.url" if part.image_url else "text"
        yield f"messages[{number}].content[{place}].{suffix}", part


def _checked(field: str, text: str) -> str:
    text = text.replace("\r\n", "\n")  # as the readers of the training data do
    try:
        check_text(text)
    except SkipSample as error:
        raise field_error(field, error.detail) from error
    return text


def decode_image(field: str, url: str) -> bytes:
    """Return the file in a `data:` URL.

    Raises:
        ApiError: it is another URL, or not base64.
    """
    head = _DATA_URL.match(url)
    if head is None:
        raise field_error(
            field,
            f"{url[:60]!r} is not a URL of the form data:image/png;base64,...; this server fetches no address, so put "
            "the file itself into the URL",
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise field_error(field, f"the data is not base64 ({error})") from error


def unusable(error: SkipSample, chat: Chat) -> ApiError:
    """Return the error of a conversation that the model cannot be asked."""
    if isinstance(error, UnusableImage):
        return field_error(chat.image_fields[error.place], f"the image cannot be used ({error}); send {USABLE}")
    return field_error("messages", f"the conversation cannot be asked ({error})")
