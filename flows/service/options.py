"""What the command line of `athanor up` asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.store import StorePath
from flows.service.access import Access
from flows.service.database import Postgres


@dataclass(frozen=True, slots=True)
class Options:
    """A service that is asked for.

    Attributes:
        database: None: SQLite in the root.
        max_runs: flow runs at a time.
        limits: slots of named concurrency limits.
    """

    root: StorePath
    access: Access
    database: Postgres | None = None
    max_runs: int = 2
    limits: Mapping[str, int] = field(default_factory=dict)


def parse_limits(texts: Sequence[str]) -> dict[str, int]:
    """["gpu=2"] -> {"gpu": 2}

    Raises:
        InputError: another form, or no slot.
    """
    limits = {}
    for text in texts:
        name, _, slots = text.rpartition("=")
        if not (name and slots.isdecimal() and int(slots) > 0):
            raise InputError(f"--limit {text} is no NAME=SLOTS with 1 slot or more; for example --limit local=1")
        limits[name] = int(slots)
    return limits
