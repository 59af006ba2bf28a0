"""Qwen3-VL: a vision encoder with deepstack in front of a Qwen3 language model.

In: config.json, a MicroBatch. Out: sizes, layers, the loss of each token trained on, the names of the weights.
Read first: `family.py`, the description without torch; then `model.py`, which tells the forward pass. `variants.py` has
models with random weights.
"""
