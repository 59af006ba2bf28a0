"""Qwen3.5 (and 3.6, 3.8, of the same architecture): layers of the gated delta rule and of gated attention, with images.

In: config.json, a MicroBatch. Out: sizes, layers, the loss of each token trained on, the names of the weights.
Read first: `family.py`, then `shape.py`. Everything that it shares with Qwen3-VL is in `qwen3_vl`.
"""
