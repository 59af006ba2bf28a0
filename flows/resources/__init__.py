"""Resources that a run holds while it runs: slots of GPUs, Dask workers, its record.

In: an ExecutionConfig. Out: slots and workers, released at the end.
Read first: `execution.py`, then `limits.py`.
"""
