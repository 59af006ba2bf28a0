"""Metrics, each equal to its published reference.

In: an answer and its references. Out: numbers whose sums determine the score.
Read first: `contract.py`, then `texts.py`.
"""
