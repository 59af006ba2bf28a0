"""The jobs, from run.json to result.json: a training (set up, step, measure, save), an export, the encoding of images.

In: a RunConfig or an EncodeRun, and a `Mesh`. Out: checkpoints, metrics.jsonl, result.json; HF weights; features.
Read first: `job.py`, then `set_up.py`, `train.py` (the loop), `step.py` (one update), `loss.py` and `optim.py`;
`export.py` and `encode_images.py` are the other two jobs.
"""
