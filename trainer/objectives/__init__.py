"""The losses that a training minimises.

In: the losses of a micro batch's loss tokens. Out: their sum and number, and the sums that a line of metrics takes.
Read first: `sft.py`.
"""
