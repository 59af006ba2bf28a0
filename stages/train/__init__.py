"""Training: the trainer is started and followed, and its result is read.

In: weights, tokenized shards, bins. Out: checkpoints, metrics, a report.
Read first: `stage.py`, then `run_trainer.py`.
"""
