"""The newest checkpoint becomes an HF directory.

In: a training and the model it began with. Out: a directory that `from_pretrained` loads.
Read first: `stage.py`.
"""
