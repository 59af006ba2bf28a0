"""The gated delta net, which replaces attention: it mixes the tokens of a segment through a state.

In: sizes; hidden states of a bin. Out: parameters, FLOPs, memory and weights of the part; the net's output.
Read first: `part.py`, then `module.py`, then `rule/`.
"""
