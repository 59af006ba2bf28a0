"""Held-out pictures that occur in train.

In: sample shards. Out: a table of the held-out pictures that occur in train, and a report.
Read first: `stage.py`, then `copies.py`.
"""
