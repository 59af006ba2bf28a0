"""Pages of artifacts: the samples that a model is shown, and what it learns of each.

In: an artifact. Out: one HTML file.
Read first: `render.py`.
"""
