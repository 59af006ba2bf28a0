"""The losses that a training minimises.

In: the losses of a micro batch's loss tokens. Out: their sum, their number, the report of the micro batch.
Read first: `sft.py`.
"""
