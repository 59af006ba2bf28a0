"""The `athanor` command.

In: the typed command line. Out: a closing table, or one line that says what to fix; and an exit status.
Read first: `main.py`, then `run.py`.
"""
