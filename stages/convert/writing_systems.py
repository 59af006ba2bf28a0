"""The scripts that a text is written in: letters counted by Unicode's script property (UAX #24)."""

import unicodedata
from collections import Counter
from functools import lru_cache

from fontTools.unicodedata import script, script_name

_ASCII_OTHER = bytes(code for code in range(128) if not chr(code).isalpha())


def count_scripts(text: str) -> dict[str, int]:
    """Return Unicode's name of a script (Latin, Han, Cyrillic, ...) -> number of its letters in the text.

    Letters are the general categories L*; digits, signs and combining marks count for no script.
    """
    latin = len(text.encode("ascii", "ignore").translate(None, _ASCII_OTHER))
    counts = Counter({"Latin": latin} if latin else {})
    if not text.isascii():
        for character, number in Counter(text).items():
            if character > "\x7f" and (name := _script_of(character)) is not None:
                counts[name] += number
    return dict(counts)


@lru_cache(maxsize=1 << 16)
def _script_of(character: str) -> str | None:
    """Return the script of a letter outside ASCII; None for any other character."""
    if not unicodedata.category(character).startswith("L"):
        return None
    return script_name(script(character)).replace("_", " ")
