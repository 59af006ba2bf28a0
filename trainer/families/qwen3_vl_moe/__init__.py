"""Qwen3-VL with experts: Qwen3-VL whose layers route tokens to experts instead of computing an MLP.

In: config.json. Out: sizes and layers; model, vision encoder and table of weights are Qwen3-VL's.
Read first: `family.py`. `variants.py` has models with random weights.
"""
