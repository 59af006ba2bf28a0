"""One function, one output directory. No Prefect here, and no megatron.

In: artifacts of other stages, or what is the user's. Out: a directory with a manifest.
Read first: `artifacts/artifact.py`, then `convert/stage.py`.
"""
