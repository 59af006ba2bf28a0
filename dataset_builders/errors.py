"""Errors whose text is meant for the user, and functions that shorten the text of any error."""

import re
from pathlib import PurePath

MANIFEST = "manifest.json"  # written in the directory of every finished artifact

LONGEST_LINE = 1500  # most characters of an error's text, which may end in a command to paste

# Control characters other than tab and line break, marks that reverse the direction of writing or have no width, half
# surrogate pairs, tags.
_UNSEEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb\ufffe\uffff"
    r"\ud800-\udfff\U000e0000-\U000e007f]"
)

# pydantic's words for a value of a wrong kind -> plain ones
_PLAIN = (
    (r"^Input should", "should"),
    (r"^Field required", "is missing"),
    (r"^Extra inputs are not permitted", "is no known field"),
    (r"(String|Tuple|List|Dictionary) should have at least 1 \w+.*", "should not be empty"),
    (r"String should match pattern", "should match the pattern"),
    (r"String should have", "should have"),
    (r"a valid (tuple|list|set|frozenset)\b", "a list, such as [a, b]"),
    (r"a valid string", "a text"),
    (r"a valid dictionary( or instance of \w+)?", "a mapping of names to values"),
    (r", unable to parse string as an? (integer|number|boolean)|, unable to interpret input", ""),
    (r"a valid boolean", "true or false"),
    (r"Input tag '\w+' found using .*", "should be a text or a mapping of names to values"),
    (r"\bNone\b", "null"),
)


class InputError(ValueError):
    """The user's input is wrong, or the machine lacks something.

    The text is one line: the file, key or field, its value, and the way out. The command line prints it without a
    traceback and exits with 2.
    """

    def __init__(self, text: str) -> None:
        # A value in the text may have any length and hold any characters.
        super().__init__(without_middle(printable(text), LONGEST_LINE))


def without_middle(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters; a mark replaces the middle of a longer text."""
    if len(text) <= limit:
        return text
    mark = f" ...({len(text)} characters)... "
    end = (limit - len(mark)) // 3
    return text[: limit - len(mark) - end] + mark + text[-end:]


def shown(value: object) -> str:
    """Return a user's value for a message: its repr, cut to at most 200 characters."""
    return without_middle(repr(value), 200)


class DamagedFile(InputError):
    """A file that we wrote is missing, cut short, or changed."""


def damaged(path: PurePath, what: str) -> DamagedFile:
    """Return the error for a damaged file or URL; `what` follows its name: "is missing"."""
    # The nearest directory with a manifest is the artifact, which only the stage that made it can make again.
    made = next((folder for folder in path.parents if (folder / MANIFEST).is_file()), None)
    way_out = "delete it" if made is None else f"delete {made}"
    return DamagedFile(f"{path} {what}; {way_out} and run the same command again, which makes it anew")


def one_line(error: Exception, limit: int = 200) -> str:
    """Return an error's text without line breaks, cut to `limit` characters."""
    return " ".join(str(error).split())[:limit]


def in_ascii(text: object, limit: int = 100) -> str:
    """Return a text from a file in a form for messages: on one line, in ASCII, cut to `limit` characters."""
    return ascii(str(text))[1:-1][:limit]


def printable(text: str) -> str:
    """Return a text with escapes, as Python has them and YAML in double quotes, for what a terminal obeys or hides.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    return _UNSEEN.sub(lambda match: ascii(match[0])[1:-1], text)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, its middle cut if it is long; the class name if there is no text."""
    return without_middle((str(error).strip() or type(error).__name__).splitlines()[0], LONGEST_LINE)


def plain_message(kind: str, text: str) -> str:
    """Return one of pydantic's texts in plain words, to follow the field's name; kind `value_error` is one of ours."""
    if kind == "value_error":
        return text.removeprefix("Value error, ")
    for words, plain in _PLAIN:
        text = re.sub(words, plain, text)
    return text
