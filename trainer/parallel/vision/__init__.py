"""Images that other ranks encode than those that use their tokens.

In: micro batches with the pixels of this rank's images. Out: on the ranks that use them, micro batches with features.
Read first: `exchange.py`, then `owner.py` and `worker.py`; for ranks that do nothing else `world.py`, `serve.py`.
"""
