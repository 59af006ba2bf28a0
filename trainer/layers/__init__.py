"""The layers that families share: attention over packed samples, the loss layer, CUDA graphs, adapters, module sets.

In: hidden states of a bin, tokens end to end. Out: hidden states, or the loss of each token trained on.
Read first: `packed_model.py`, one chunk of a model; then `packed_layer.py` and `attention_cores.py`. `kernels.py` has
the Triton kernels, `lora.py` and `float8_base.py` have adapters and the frozen weights beside them.
"""
