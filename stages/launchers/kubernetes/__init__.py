"""Jobs as TrainJobs of Kubeflow Trainer.

In: a Job. Out: a manifest, the pods' logs, its exit status.
Read first: `launcher.py`.
"""
