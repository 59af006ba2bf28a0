"""The one error class whose text is meant for the person at the keyboard."""


class InputError(ValueError):
    """Something the user gave is wrong, or the machine lacks something.

    The text is one line: the file, key or field, the value, and the way out.
    The command line prints it without a traceback and exits with 2.
    """
