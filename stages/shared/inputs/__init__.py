"""The inputs of a run that a user gives: raw rows, a model, an adapter.

In: a path or a hub name. Out: an External with its digest, or an open directory.
Read first: `raw_source.py`, `model_directory.py`.
"""
