"""An error in the form of OpenAI's API."""

import json
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from dataset_builders.errors import plain_message, shown, without_middle

_LONGEST = 500


class ApiError(Exception):
    """A request that is refused, or an answer that failed.

    Args:
        status: HTTP status.
        message: one line: the field, its value and the way out.
        param: the field, such as `messages[0].content`; None if no field is wrong.
        code: OpenAI's name of the error, if it has one.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the error."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        message = _in_utf8(without_middle(" ".join(str(self).split()), _LONGEST))
        param = self.param and _in_utf8(without_middle(self.param, _LONGEST))
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the HTTP response of the error."""
        headers = {"Retry-After": "1"} if self.status == 429 else None
        return JSONResponse(self.body(), self.status, headers)


def field_error(field: str, message: str, code: str | None = None) -> ApiError:
    """Return the error of a field."""
    return ApiError(400, f"{field}: {message}", field, code)


def _in_utf8(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def of_validation(error: ValidationError) -> ApiError:
    """Return the first error of a request's check."""
    first = error.errors(include_url=False)[0]
    field = ""
    for part in first["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}"
    field = field.lstrip(".")
    if first["type"] == "extra_forbidden":
        return field_error(field, "this server does not know the field; leave it out", "unknown_parameter")
    if first["type"] == "missing":
        return field_error(field, "the field is required", "missing_required_parameter")
    message = f"{plain_message(first['type'], first['msg'])}, got {shown(first['input'])}"
    return field_error(field, message) if field else ApiError(400, f"the body: {message}")


def parse_json(body: bytes) -> Any:
    """Return the JSON value of a request's body.

    Raises:
        ApiError: the body is not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({error})") from error
