"""Qwen3.5 with experts (and 3.6, of the same architecture): Qwen3.5 whose layers route tokens to experts.

In: config.json. Out: sizes and layers; model, vision encoder and table of weights are Qwen3-VL's.
Read first: `family.py`. `variants.py` has models with random weights.
"""
