"""The gated delta rule and what stands around it, over packed bins: in torch, and in Triton kernels for Hopper.

In: queries, keys, values and gates of a bin's tokens, and where its segments lie. Out: what each segment's state
answers, and by autograd every gradient. Knows no model.

Read first: `gated_delta_net.py`, which puts the parts together; then `plain.py`, the formulas.
"""
