"""The model before training beside the trained one.

In: two evaluations of the same samples. Out: the gain of each score with its interval, and a report.
Read first: `stage.py`.
"""
