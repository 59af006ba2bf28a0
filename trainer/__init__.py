"""The training program: one process per GPU, started by torchrun with one JSON file. Uses no Prefect and no MLflow.

In: run.json. Out: checkpoints, metrics.jsonl, result.json, or HF weights.
Read first: `contract/run.py`, then `loop/train.py`.
"""
