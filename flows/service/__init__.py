"""`athanor up`: starts Prefect, MLflow and a worker on this machine, keeps them running, and ends them together.

In: a root and an address to listen on. Out: a running service.
Read first: `supervisor.py`, then `programs.py`.
"""
