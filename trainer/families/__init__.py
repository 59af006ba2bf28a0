"""Model families: one folder each.

In: the parsed config.json of an HF directory. Out: its sizes (without torch) and its model.
Read first: `qwen3_vl/family.py`; README.md explains how to add a family.
"""
