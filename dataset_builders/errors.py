"""The one error class whose text is meant for the person at the keyboard, and any error in one line."""


class InputError(ValueError):
    """Something the user gave is wrong, or the machine lacks something.

    The text is one line: the file, key or field, the value, and the way out.
    The command line prints it without a traceback and exits with 2.
    """


def one_line(error: Exception, limit: int = 200) -> str:
    """An error's text without line breaks, cut to `limit` characters."""
    return " ".join(str(error).split())[:limit]


def first_line(error: Exception) -> str:
    """The first line of an error's text; the name of its class if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
