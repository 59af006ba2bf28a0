"""The layers that families share: attention over packed samples, the loss layer, CUDA graphs, the two module sets.

In: hidden states of a bin, tokens end to end. Out: the same, or the loss of each learnt token.
Read first: `packed_layer.py`, then `attention.py`.
"""
