"""`athanor up`: starts Prefect, MLflow and a worker on this machine, keeps them running, and ends them together.

In: a root and an address to listen on; requests of the name of a recipe and the settings that differ from it. Out: a
running service, flow runs, or one line that says what to fix.
Read first: `supervisor.py` and `programs.py`, then `access.py` and `guard.py`, then `deployments.py` and `request.py`.
"""
