"""Low-rank adapters beside the linear layers of a model.

In: a chunk of a model with its weights, its table of weights. Out: the same chunk, whose adapters alone are trained.
Read first: `adapter.py`, then `convert.py`.
"""
