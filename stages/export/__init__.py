"""The export of the newest checkpoint to an HF directory.

In: a training and the model that it started from. Out: a directory that `from_pretrained` loads.
Read first: `stage.py`.
"""
