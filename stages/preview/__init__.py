"""Pages of artifacts: the samples that a model gets, and the tokens that it is trained on.

In: an artifact. Out: one HTML file.
Read first: `render.py`.
"""
