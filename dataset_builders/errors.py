"""The one error class whose text is meant for the person at the keyboard, and any error in one line."""

LONGEST_LINE = 1500  # characters of an error's text, which may end in a command to paste


class InputError(ValueError):
    """Something the user gave is wrong, or the machine lacks something.

    The text is one line: the file, key or field, the value, and the way out. A value may be of any length, so the
    middle of a long text is left out. The command line prints it without a traceback and exits with 2.
    """

    def __init__(self, text: str) -> None:
        super().__init__(without_middle(text, LONGEST_LINE))


def without_middle(text: str, limit: int) -> str:
    """A text of at most `limit` characters: of a longer one the first two thirds of them and the end."""
    if len(text) <= limit:
        return text
    mark = f" ...({len(text)} characters)... "
    end = (limit - len(mark)) // 3
    return text[: limit - len(mark) - end] + mark + text[-end:]


def shown(value: object) -> str:
    """A value that somebody gave, for a message: its repr, at most 200 characters of it."""
    return without_middle(repr(value), 200)


def one_line(error: Exception, limit: int = 200) -> str:
    """An error's text without line breaks, cut to `limit` characters."""
    return " ".join(str(error).split())[:limit]


def first_line(error: Exception) -> str:
    """The first line of an error's text, without the middle of a long one; the name of its class if it has no text."""
    return without_middle((str(error).strip() or type(error).__name__).splitlines()[0], LONGEST_LINE)
