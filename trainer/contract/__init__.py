"""The trainer's input and output. Loads neither torch nor megatron.

In: `RunConfig`, as run.json. Out: `MetricsRow` lines in metrics.jsonl and a `TrainResult`, as result.json.
Read first: `run.py`, then `result.py`; `checkpoint.py` has the digests of a checkpoint, and `modules.py` the choice of
the layers' modules for a host.
"""
