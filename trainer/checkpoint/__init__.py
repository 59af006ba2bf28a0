"""Checkpoints that any layout can load, and the reading and writing of HF weights.

In: chunks of the model and the optimizer, or safetensors. Out: `step-000500/` directories, an HF directory.
Read first: `saver.py`, `directory.py`, then `save_and_load.py`; `hf_weights.py` for weights.
"""
