"""Model families: one folder each, and the registry that finds a family by the `model_type` of config.json.

In: an HF directory. Out: its sizes (without torch) and its model.
Read first: `family.py`, then `registry.py`, then `qwen3_vl/family.py`; README.md says how to add a family.
"""
