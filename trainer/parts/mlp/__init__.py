"""The gated MLP of a decoder layer.

In: sizes; hidden states of a bin. Out: parameters, FLOPs, memory and weights of the part; the MLP's output.
Read first: `part.py`, then `module.py`.
"""
