"""Jobs and the places where they run: this host, SLURM, Kubernetes.

In: a Job and a ClusterConfig. Out: its log and its exit status; no process of it is left.
Read first: `job.py`, then `torchrun.py`.
"""
