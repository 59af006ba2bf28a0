"""The `athanor` command.

In: what was typed. Out: a closing table, or one line that says what to mend; and an exit status.
Read first: `main.py`; `commands/` has one file per command.
"""
