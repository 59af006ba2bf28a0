"""A model family that exists only here: odd layers have a gate after attention, even layers have blended MLPs, half of
a head is rotated, no deepstack.

In: the parts of a family's folder. Out: a `Family` that tests register by an entry point.
Read first: `family.py`, then `model.py`.
"""
