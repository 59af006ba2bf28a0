"""`athanor up`: Prefect, MLflow and a worker on this machine, kept running, and ended together.

In: a root and ports. Out: a running service.
Read first: `run_service.py`, then `supervisor.py`.
"""
