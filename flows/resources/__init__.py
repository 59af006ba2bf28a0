"""The resources that a run holds while it runs: GPU slots, Dask workers, its record.

In: an ExecutionConfig. Out: slots and workers, released at the end.
Read first: `execution.py`, then `limits.py`.
"""
