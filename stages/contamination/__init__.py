"""Held-out images that occur in the training split.

In: sample shards. Out: a table of the held-out images that occur in the training split, and a report.
Read first: `stage.py`, then `copies.py`.
"""
