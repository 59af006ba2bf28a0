"""Jobs by sbatch.

In: a Job. Out: a file for sbatch, the job's log, its exit status.
Read first: `launcher.py`.
"""
