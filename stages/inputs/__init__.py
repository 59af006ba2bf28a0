"""The inputs of a run: raw rows and a model, given by the user or made here.

In: a path, a hub name, a seed. Out: an External with its digest, or an artifact.
Read first: `raw_source.py`, `model_directory.py`.
"""
