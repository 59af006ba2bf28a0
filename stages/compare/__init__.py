"""The comparison of the model before training with the trained model.

In: two evaluations of the same samples. Out: the gain of each score with its interval, and a report.
Read first: `stage.py`.
"""
