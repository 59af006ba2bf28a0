"""Grouped-query attention with rotary positions, with or without a gate for each head.

In: sizes; hidden states of a bin. Out: parameters, FLOPs, memory and weights of the part; attention's output.
Read first: `part.py`, then `module.py`.
"""
