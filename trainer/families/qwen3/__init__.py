"""Qwen3: a dense, text-only language model.

In: config.json, a MicroBatch. Out: sizes, layers, the loss of each token trained on, the names of the weights.
Read first: `family.py`, the description without torch; then `model.py`, which tells the forward pass.
"""
