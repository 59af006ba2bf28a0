"""The conversion of samples to tokens and patches.

In: sample shards and a processor. Out: tokenized shards, an index of them, and a report.
Read first: `stage.py`, then `shard.py`.
"""
