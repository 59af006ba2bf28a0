"""Qwen3: a dense language model, text alone.

In: config.json, a MicroBatch. Out: sizes, layers, the loss of each learnt token, the names of its weights.
Read first: `family.py`, then `model.py`.
"""
