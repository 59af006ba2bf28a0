"""The features of a frozen vision encoder for each distinct image, computed once.

In: weights, tokenized shards. Out: shards of features by content, and the records of each sample's images.
Read first: `stage.py`, then `plan.py`.
"""
