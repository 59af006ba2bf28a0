"""The encoding of images on ranks other than those that use the image tokens.

In: micro batches with the pixels of this rank's images. Out: on the ranks that use them, micro batches with features.
Read first: `exchange.py`, from its docstring on; `world.py` for ranks that only encode.
"""
