"""A job from run.json to result.json: set up, step, measure, save.

In: a RunConfig and a `Mesh`. Out: checkpoints, metrics.jsonl, result.json.
Read first: `job.py`, then `set_up.py`, `train.py` (the loop), `step.py` (one update) and `optim.py`.
"""
