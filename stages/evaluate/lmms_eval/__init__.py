"""The held-out samples as a task of lmms-eval.

In: sample shards, or a finished run (`__main__.py`). Out: a task directory that needs nothing of athanor.
Read first: `task.py`.
"""
