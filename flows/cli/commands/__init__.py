"""The commands of `athanor`, one file per command.

In: parsed arguments. Out: what the command prints and its exit status.
Read first: `run.py`.
"""
