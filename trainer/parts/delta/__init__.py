"""The gated delta net, which mixes the tokens of a segment by a state in place of attention.

In: sizes; hidden states of a bin. Out: parameters, FLOPs, memory and weights of the part; what the net gives.
Read first: `part.py`, then `module.py`, then `rule/`.
"""
