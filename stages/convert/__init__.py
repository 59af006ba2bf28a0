"""The conversion of raw rows to sample shards.

In: a source and its builder. Out: shards, the rows left out with their reasons, a report and a card.
Read first: `stage.py`, then `plan.py`.
"""
