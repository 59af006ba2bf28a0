"""Prefect's server: one that runs already, or one for this command alone.

In: a root. Out: its address, its home, its processes.
Read first: `service_record.py`, then `temporary.py`.
"""
