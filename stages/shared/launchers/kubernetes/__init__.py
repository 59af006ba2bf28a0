"""Jobs as TrainJobs of Kubeflow Trainer.

In: a Job. Out: a manifest, the log of the first pod, its exit status.
Read first: `launcher.py`.
"""
