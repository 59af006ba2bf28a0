"""A model family that exists only here: every other layer has a gate, half of a head is rotated, no deepstack.

In: the parts of a family's folder. Out: a `Family` that tests register by an entry point.
Read first: `family.py`, then `model.py`.
"""
