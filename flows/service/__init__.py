"""`athanor up`: Prefect, MLflow and a worker on this machine, watched, and ended together."""
