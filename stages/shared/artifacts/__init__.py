"""Stages and artifacts: an artifact is reused, or made under a lock and published by one rename.

In: a stage, its config, its inputs. Out: a committed directory with a manifest.
Read first: `artifact.py`, then `run_stage.py`.
"""
