"""Checkpoints that any layout can load, and HF weights in and out.

In: chunks of the model and the optimizer, or safetensors. Out: `step-000500/` directories, an HF directory.
Read first: `saver.py`, `directory.py`, then `save_and_load.py`; `hf_read.py` and `hf_write.py` for weights.
"""
