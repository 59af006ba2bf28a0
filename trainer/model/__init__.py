"""The description of a model without torch: sizes, weights and their names on disk, and which layers get adapters.

In: config.json of an HF directory. Out: a `Family`, a `ModelShape` and the table of weights.
Read first: `family.py`, then `shape.py`, `layer.py` and `rules.py`; `adapters.py` has what adapters train, and
`registry.py` finds a family by its `model_type`.
"""
