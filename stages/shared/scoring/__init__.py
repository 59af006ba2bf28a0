"""The scores of answers, and their confidence intervals.

In: answers and references. Out: one value per sample, one mean and interval per subset.
Read first: `metrics/contract.py`, then `subsets.py`.
"""
