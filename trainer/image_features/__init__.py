"""The one-time encoding of images, for trainings whose vision encoder is frozen.

In: tables of distinct images, tokenized shards, weights. Out: shards of features with their indexes.
Read first: `encode.py`.
"""
