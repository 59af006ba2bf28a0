"""Low-rank adapters of the linear layers of a model.

In: a chunk of a model with its weights, its table of weights. Out: the same chunk, which trains only its adapters.
Read first: `adapter.py`, then `convert.py`.
"""
