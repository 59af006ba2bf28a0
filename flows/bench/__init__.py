"""`athanor bench`: lmms-eval's tasks before and after training.

In: a model, of a finished run or by itself. Out: scores with intervals in the run, its gates and its report.
Read first: `bench.py`.
"""
