"""The scoring of answers.

In: answers and held-out samples. Out: scores with intervals, predictions, a report.
Read first: `stage.py`.
"""
