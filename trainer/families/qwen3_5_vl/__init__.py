"""Qwen3.5 (and 3.6, 3.8, of the same architecture): layers of the gated delta rule and of gated attention, with images.

In: config.json. Out: sizes and layers; model, vision encoder and table of weights are Qwen3-VL's.
Read first: `family.py`, which tells how the forward pass differs from Qwen3-VL's. `variants.py` has models with random
weights.
"""
