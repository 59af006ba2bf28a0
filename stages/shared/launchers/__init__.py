"""Jobs and their launchers: this host, SLURM, Kubernetes.

In: a Job and a ClusterConfig. Out: its log and its exit status; none of its processes is left.
Read first: `job.py`, then `torchrun.py`.
"""
