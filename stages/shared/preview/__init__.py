"""The contents of artifacts on their pages: the samples that a model gets, and the tokens that it is trained on.

In: an artifact. Out: HTML.
Read first: `render.py`.
"""
