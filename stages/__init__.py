"""Stages: each is one function that writes one output directory. No module here imports Prefect or megatron.

In: artifacts of other stages, or the user's own files. Out: a directory with a manifest.
Read first: `artifacts/artifact.py`, then `convert/stage.py`.
"""
