"""The check that an export loads elsewhere and gives the same answers.

In: an export, the model that its training started from, its answers and the held-out samples. Out: a report.
Read first: `stage.py`, then `verdict.py`.
"""
