"""The settings of the loss mask."""

from typing import Literal

Learn = Literal["all", "last"]  # answers of a conversation that are learnt
