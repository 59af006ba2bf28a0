"""The layers that families share: attention over packed samples, the loss layer, CUDA graphs, the two module sets.

In: hidden states of a bin, tokens end to end. Out: hidden states, or the loss of each token trained on.
Read first: `packed_layer.py`, then `attention_cores.py`.
"""
