"""The gated delta rule and the operations around it, over packed bins: in torch, and in Triton kernels for Hopper.

In: queries, keys, values and gates of a bin's tokens, and the bounds of its segments. Out: the output of each segment's
state, and by autograd every gradient. This package does not depend on a model.

Read first: `gated_delta_net.py`, which combines the operations; then `plain.py`, the formulas; `kernels.py` has them
for a GPU.
"""
