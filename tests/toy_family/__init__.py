"""A family that lives here alone: every other layer has a gate, half of a head is turned, there is no deepstack.

In: what a family's folder gives. Out: a `Family` that tests register by an entry point.
Read first: `family.py`, then `model.py`.
"""
