from dataclasses import dataclass
from typing import Any


@dataclass
class ChatParams:
    """renderers/params.py."""

    chat_template_kwargs: dict[str, Any]
