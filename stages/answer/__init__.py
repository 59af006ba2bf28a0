"""A model's answers to the held-out samples, by the chosen engine, on one or many GPUs.

In: an HF directory, sample shards. Out: `answers.jsonl`, the same for any number of workers.
Read first: `stage.py`, then `engine.py`.
"""
