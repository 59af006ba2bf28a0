"""The training speed of this machine, measured on random weights of a published size, or on a model, and drawn bins.

In: a variant or a model directory, and settings. Out: tokens, FLOP/s and memory of counted steps.
Read first: `measure.py`.
"""
