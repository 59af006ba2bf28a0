"""Qwen3.5 (and 3.6, 3.8, of the same architecture): layers of the gated delta rule and of gated attention, with images.

In: config.json, a MicroBatch. Out: sizes, layers, the loss of each learnt token, the names of its weights.
Read first: `family.py`, then `shape.py`, then `model.py`. What it shares with Qwen3-VL comes from there.
"""
