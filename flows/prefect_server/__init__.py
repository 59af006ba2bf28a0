"""Prefect's server: one that is already running, or a temporary one for this command.

In: a root. Out: its address, its home, its processes.
Read first: `service_record.py`, then `temporary.py`.
"""
