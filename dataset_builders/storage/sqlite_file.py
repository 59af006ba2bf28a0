"""Whether an SQLite database can be used."""

import contextlib
import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

from dataset_builders.errors import InputError

_SECONDS = 1.0  # for another process that holds the database
_RUINED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def check_database(path: Path, lost: str) -> None:
    """Check the whole database, if there is one and no other process holds it. `lost` is its content, in words."""
    if not path.exists():
        return
    if not all(os.access(place, os.W_OK) for place in (path, path.parent)):
        raise InputError(f"{path} or its directory cannot be written; permit it, or choose another --root")
    verdict = "it is no file"
    if path.is_file():
        verdict = _verdict(path)
    if verdict != "ok":
        raise InputError(
            f"{path} is no whole SQLite database ({verdict}); put a copy in its place, or move {path}* away: a new one "
            f"is made, without {lost}"
        )


def _verdict(path: Path) -> str:
    """Return "ok", or what is wrong."""
    try:
        address = f"file:{quote(str(path))}?mode=rw"
        with contextlib.closing(sqlite3.connect(address, _SECONDS, uri=True)) as database:
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
            return " ".join(verdict.split())
    except sqlite3.DatabaseError as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # an extended code has more bits
        return str(error) if code in _RUINED else "ok"
